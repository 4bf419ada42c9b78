"""Power cuts and bad memory: a checkpoint counts once it is on the disk as it was trained."""
import contextlib
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import warnings

import jax
import numpy as np
import pytest
from power import Disk
from soak import make_state, make_stream, train

from meshbook.proofs.verdicts import named_leaves
from meshbook.saving import checkpoint_files, checkpoints, contents, manifests
from meshbook.saving.checkpoints import Checkpoints, NotSaved, restore, steps

KEY = jax.random.key(7)
WHERE = {"next_index": 0}
pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="reads Linux's /proc")


@pytest.fixture(scope="module")
def fresh():
    return make_state(None, hidden=4)


def at(state, step):
    return dataclasses.replace(state, step=state.step * 0 + step)


@contextlib.contextmanager
def begun(folder, state, **options):
    with Checkpoints(folder, **options) as run:
        run.resume(state, make_stream(), KEY)
        yield run


def power_cuts(folder, state, keep):
    """[(steps that were saved before, moment, which, folder)] of a run of three saves."""
    cuts = []
    with Disk(folder, folder.with_name("images")) as disk, begun(folder, state, keep=keep) as run:
        for step in (1, 2, 3):
            run.save(at(state, step), WHERE, KEY)
            run.wait()
            cuts += [(step - 1, *image) for image in disk.images[len(cuts):]]
    return cuts


def survives(cut, state):
    """The newest checkpoint is there, whole, and nothing else looks like one."""
    before, moment, which, image = cut
    with warnings.catch_warnings(action="error"):
        step, *_ = checkpoint_files.newest(image, state)
    assert before <= step <= before + 1 or step == before == 0, (moment, which)
    for each in steps(image):
        manifests.verify(image / str(each))


@pytest.mark.parametrize("keep", [1, 2])
def test_no_power_cut_loses_the_newest_checkpoint(tmp_path, fresh, keep):
    cuts = [cut for cut in power_cuts(tmp_path / "run", fresh, keep) if cut[0]]
    assert len(cuts) > 100
    for cut in cuts:
        survives(cut, fresh)


def only_files(sync):
    return lambda path: None if os.path.isdir(path) else sync(path)


def only_folders(sync):
    return lambda path: sync(path) if os.path.isdir(path) else None


def all_but_the_manifest(sync):
    return lambda path: None if manifests.NAME in str(path) else sync(path)


def nothing_after_a_rename(sync):
    return lambda path: None if ".saving" not in str(path) else sync(path)


@pytest.mark.parametrize("mutant", [only_files, only_folders, all_but_the_manifest,
                                    nothing_after_a_rename])
def test_without_one_kind_of_sync_a_power_cut_does(tmp_path, fresh, monkeypatch, mutant):
    monkeypatch.setattr(manifests, "sync", mutant(manifests.sync))
    cuts = [cut for cut in power_cuts(tmp_path / "run", fresh, keep=1) if cut[0]]
    lost = 0
    for cut in cuts:
        try:
            survives(cut, fresh)
        except (AssertionError, UserWarning, manifests.Damaged):
            lost += 1
    assert lost > 0


def test_a_new_folder_is_on_the_disk_with_those_above_it(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(manifests, "sync", synced.append)
    manifests.make_folder(tmp_path / "a" / "b")
    assert synced == [tmp_path / "a", tmp_path] and (tmp_path / "a" / "b").is_dir()
    manifests.make_folder(tmp_path / "a" / "b")
    assert len(synced) == 2


TRACED = """if True:
    import sys, jax
    jax.config.update("jax_platforms", "cpu")
    from test_durability import at, begun, make_state, KEY, WHERE
    state = make_state(None, hidden=4)
    with begun(sys.argv[1], state) as run:
        run.save(at(state, 1), WHERE, KEY)"""


def test_the_system_is_asked_to_write_before_a_name_is_given(tmp_path):
    """Every file and folder of a step, orbax's and tensorstore's too, as the kernel sees it."""
    trace = ["strace", "-f", "-y", "-qq", "-s", "4096", "-o", tmp_path / "trace",
             "-e", "trace=fsync,rename,renameat,renameat2"]
    if shutil.which("strace") is None or subprocess.run([*trace, "true"]).returncode:
        pytest.skip("strace is not installed, or may not trace here")
    run = tmp_path / "run"
    subprocess.run([*trace, sys.executable, "-c", TRACED, run], check=True, capture_output=True,
                   env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
                   cwd=os.path.dirname(__file__))
    calls = (tmp_path / "trace").read_text().splitlines()
    named = [number for number, call in enumerate(calls)
             if re.search(rf'rename.*"{run}/.saving/1".*"{run}/1"', call)]
    assert len(named) == 1
    synced = lambda some: set(re.findall(r"fsync\(\d+<([^>]*)>", "\n".join(some)))
    before, after = synced(calls[:named[0]]), synced(calls[named[0]:])
    paths = [run / "1", *(run / "1").rglob("*")]
    assert len(paths) > 10
    expected = {f"{run}/.saving/1/{path.relative_to(run / '1')}".removesuffix("/.")
                for path in paths} - {f"{run}/.saving/1/{manifests.NAME}"}
    assert expected | {f"{run}/.saving/1/{manifests.NAME}.unfinished"} <= before
    assert {str(run), f"{run}/.saving"} <= after


@pytest.mark.parametrize("keep", [1, 3])
@pytest.mark.parametrize("name", ["params", "opt_state"])
def test_a_bit_that_flips_on_its_way_to_the_disk_is_noticed(
        tmp_path, fresh, monkeypatch, keep, name):
    save = checkpoint_files.save

    def flipping(folder, tree):
        array = jax.tree.leaves(tree[name])[-1]
        array.reshape(-1).view(np.uint8)[0] ^= 1
        save(folder, tree)

    with begun(tmp_path, fresh, keep=keep) as run:
        run.save(at(fresh, 1), WHERE, KEY)
        run.wait()
        monkeypatch.setattr(checkpoint_files, "save", flipping)
        run.save(at(fresh, 2), WHERE, KEY)
        with pytest.raises(NotSaved, match=f"{name}/.*: expected SHA-256 .* that was trained, "
                           "found .* newest checkpoint is that of step 1"):
            run.wait()
    assert steps(tmp_path) == [1] and int(restore(tmp_path, fresh).step) == 1


def test_an_array_that_is_read_otherwise_than_it_was_trained_is_skipped(
        tmp_path, fresh, monkeypatch):
    with begun(tmp_path, fresh) as run:
        run.save(at(fresh, 1), WHERE, KEY)
        run.wait()
        with monkeypatch.context() as patch:  # a writer that is wrong and believes itself
            patch.setattr(checkpoint_files, "read_arrays", lambda *_: None)
            patch.setattr(checkpoint_files, "digests", lambda tree: contents.digests(
                jax.tree.map(lambda x: x * 0, tree)))
            run.save(at(fresh, 2), WHERE, KEY)
            run.wait()
    with pytest.warns(UserWarning, match="step 2 is skipped: .*expected SHA-256"):
        assert int(restore(tmp_path, fresh).step) == 1


def test_only_the_newest_step_is_hashed_where_it_is_intact(tmp_path, monkeypatch):
    train(tmp_path, 15, every=5)
    hashed, measure = [], manifests.measure
    monkeypatch.setattr(manifests, "measure", lambda path: hashed.append(path) or measure(path))
    state = restore(tmp_path, make_state())
    files = [path for path in (tmp_path / "15").rglob("*")
             if path.is_file() and path.name != manifests.NAME]
    assert sorted(hashed) == sorted(files)
    hashed.clear()
    with begun(tmp_path, make_state(), keep=1) as run:
        resumed = len(hashed)
        run.save(at(state, 16), WHERE, KEY)
    assert resumed == len(files) and steps(tmp_path) == [16]
    assert {path.relative_to(tmp_path).parts[:2] for path in hashed[resumed:]} == {(".saving", "16")}


def test_leaves_are_hashed_whole_and_in_c_order(tmp_path):
    state = checkpoints.arrays(make_state((4, 2)))
    whole = {name: np.asarray(x) for name, x in named_leaves(state).items()}
    turned = {name: np.asfortranarray(x) for name, x in whole.items()}
    assert contents.digests(contents.host_copy(state)) == contents.digests(turned)
    changed = whole | {"params/w_FC": whole["params/w_FC"][::-1]}
    assert contents.digests(whole) != contents.digests(changed)
    half = np.zeros((3, 1), "bfloat16")
    assert len({*contents.digests({"a": half, "b": half + 1, "c": np.zeros((), "bfloat16")}
                                  ).values()}) == 3
