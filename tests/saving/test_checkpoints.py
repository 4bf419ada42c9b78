"""Checkpoints: what is saved comes back, on any mesh; what is damaged is named and skipped."""
import collections
import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import threading
import warnings

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from saved_runs import WHERE, assert_equal, at, begun
from soak import make_state, make_stream, train

from meshbook.models import ViT, ViTConfig
from meshbook.saving import checkpoints, contents, manifests, runs
from meshbook.saving.checkpoint_files import check_leaves
from meshbook.saving.checkpoints import Checkpoints, NotSaved, OtherModel, restore, steps
from meshbook.sharding import Sharding, make_mesh
from meshbook.training import create_state, fit


def test_all_of_a_run_comes_back(tmp_path, key):
    state, stream = make_state(), make_stream()
    with Checkpoints(tmp_path) as run:
        state, _ = run.resume(state, stream, key)
        rest = itertools.islice(stream, 7)
        state, _ = fit(state, rest, key, run.on_step(stream, key, every=5))
    stream, next_batch = make_stream(), next(stream)
    with Checkpoints(tmp_path) as run:
        found, found_key = run.resume(make_state(), stream, key)
    assert int(found.step) == 7
    assert_equal(found, state)
    assert jax.random.key_data(found_key).tolist() == jax.random.key_data(key).tolist()
    np.testing.assert_array_equal(next(stream)["inputs"], next_batch["inputs"])


def test_the_manifest_describes_every_file_and_every_leaf(saved):
    manifest = manifests.read_manifest(saved / "10")
    files = {path.relative_to(saved / "10").as_posix()
             for path in (saved / "10").rglob("*") if path.is_file()}
    assert set(manifest["files"]) | {"manifest.json"} == files
    hashes = contents.digests(contents.host_copy(checkpoints.arrays(restore(saved, make_state()))))
    for name in ("params/w_XF", "opt_state/0/mu/w_XF"):
        assert manifest["leaves"][name] == {"dtype": "float32", "shape": [64, 32],
                                            "spec": [None, "model"], "sha256": hashes[name]}
    assert manifest["position"] == {"json": {"next_index": 10}} and manifest["step"] == 10


def vit(mesh, row, seed=0):
    config = ViTConfig(patch=16, embed=16, hidden=32, heads=2, layers=1)
    make = lambda: ViT(config, getattr(Sharding, row)(), rngs=nnx.Rngs(seed))
    return create_state(make, optax.adam(1e-3), make_mesh(mesh))


def assert_moved(state, there, folder, key):
    """Save the state, resume into another one, and return what came: equal, but laid out anew."""
    with begun(folder, state, key) as run:
        run.save(state, WHERE, key)
    with Checkpoints(folder) as run:
        found, _ = run.resume(there, make_stream(), key)
    assert_equal(found, state)
    for x, target in zip(*map(jax.tree.leaves, (found, there))):
        assert x.sharding == target.sharding
        assert [s.data.shape for s in x.addressable_shards] == [
            s.data.shape for s in target.addressable_shards]
    return found


def test_a_state_moves_over_meshes_and_back(saved, tmp_path, key, fresh):
    state = restore(saved, fresh)  # after ten steps: no moment is zero
    for number, mesh in enumerate([(8, 1), (4, 2), None, (4, 2), (8, 1)]):
        state = assert_moved(state, make_state(mesh), tmp_path / str(number), key)


def test_a_state_moves_from_one_table_of_layouts_to_another(tmp_path, key):
    split = vit((4, 2), "fully_sharded", seed=1)
    assert_moved(vit((8, 1), "data_parallel"), split, tmp_path, key)


def test_each_device_is_given_its_own_part_and_no_more(saved, monkeypatch):
    there = make_state((2, 4))
    make, sizes = jax.make_array_from_callback, []

    def counting(shape, sharding, part):
        return make(shape, sharding, lambda index: sizes.append(part(index).size) or part(index))

    monkeypatch.setattr(jax, "make_array_from_callback", counting)
    restore(saved, there)
    parts = [shard.data.size for x in jax.tree.leaves(there) for shard in x.addressable_shards]
    assert set(sizes) == set(parts) and len(sizes) <= len(parts)  # equal parts are read once


@pytest.mark.parametrize("mesh", [(4, 2), None])
@pytest.mark.parametrize("copy, right", [(contents.host_copy, True), (lambda tree: tree, False)])
def test_a_save_has_its_own_numbers_when_the_next_step_takes_the_memory(
        tmp_path, key, monkeypatch, mesh, copy, right):
    state, stream, go = make_state(mesh, hidden=2048), make_stream(), threading.Event()
    monkeypatch.setattr(checkpoints, "host_copy", copy)
    with begun(tmp_path, state, key) as run, contextlib.ExitStack() as stack:
        stack.callback(go.set)  # whatever fails here, nobody waits for ever
        state, _ = fit(state, itertools.islice(stream, 2), key)
        expected, write = jax.tree.map(lambda x: x.copy(), state), run.write
        monkeypatch.setattr(run, "write", lambda *what: go.wait() and write(*what))
        run.save(state, stream.get_state(), key)
        late, _ = fit(state, itertools.islice(stream, 20), key)
        jax.block_until_ready(late)
        assert steps(tmp_path) == []  # twenty steps later it is still being written
        if not right:
            stack.enter_context(pytest.raises(NotSaved, match="Array has been deleted"))
        go.set()
        run.wait()
    if right:
        assert_equal(restore(tmp_path, late), expected)


def test_a_host_copy_leaves_the_devices_their_memory(key):
    state, stream = make_state(), make_stream()
    held = contents.host_copy(checkpoints.arrays(state))
    pointers = [x.unsafe_buffer_pointer() for x in first_shards(state.params)]
    state, _ = fit(state, itertools.islice(stream, 1), key)
    assert [x.unsafe_buffer_pointer() for x in first_shards(state.params)] == pointers
    assert_equal(dataclasses.replace(state, **held), make_state())


def first_shards(tree):
    return [x.addressable_shards[0].data for x in jax.tree.leaves(tree)]


def test_the_newest_remain(tmp_path, fresh, key):
    with begun(tmp_path, fresh, key, keep=2) as run:
        for step in (3, 4, 10, 11):
            run.save(at(fresh, step), WHERE, key)
    assert steps(tmp_path) == [10, 11]


@pytest.mark.parametrize("step", [0, 1])
def test_a_run_may_save_before_its_first_step(tmp_path, fresh, key, step):
    with pytest.raises(FileNotFoundError, match="expected a checkpoint in .* found none"):
        restore(tmp_path, fresh)
    with begun(tmp_path, fresh, key) as run:
        run.save(at(fresh, step), WHERE, key)
    assert steps(tmp_path) == [step]
    assert_equal(restore(tmp_path, make_state(hidden=32)), at(fresh, step))


def test_a_kill_while_an_old_step_is_deleted_leaves_no_half_of_it(
        tmp_path, fresh, key, monkeypatch):
    with begun(tmp_path, fresh, key, keep=1) as run:
        run.save(at(fresh, 1), WHERE, key)
        run.wait()
        with monkeypatch.context() as patch:
            rmtree = shutil.rmtree
            patch.setattr(shutil, "rmtree", lambda path, **options: (
                (path / "_METADATA").unlink() if path.name == "1" else rmtree(path, **options)))
            run.save(at(fresh, 2), WHERE, key)
            run.wait()
        assert steps(tmp_path) == [2] and os.listdir(tmp_path / ".saving") == ["1"]
        run.save(at(fresh, 3), WHERE, key)
    assert steps(tmp_path) == [3] and os.listdir(tmp_path / ".saving") == []


def test_another_model_is_refused(saved):
    with pytest.raises(OtherModel, match=r"10 is of another model: .*params/w_XF: expected "
                       r"float32 \(64, 16\), found float32 \(64, 32\)"):
        restore(saved, make_state(hidden=16))
    with pytest.raises(OtherModel, match="blocks/0/.*expected float32 .* found none; and .* more"):
        restore(saved, vit((4, 2), "data_parallel"))
    state = make_state()
    half = dataclasses.replace(state, params=jax.tree.map(lambda x: x.astype("bfloat16"),
                                                          state.params))
    with pytest.raises(OtherModel, match="params/w_FC: expected bfloat16 .* found float32"):
        restore(saved, half)


@pytest.mark.parametrize("count", [1, 3, 4, 9])
def test_of_other_leaves_three_are_named_and_the_rest_is_counted(count):
    found = {f"params/{number}": {"dtype": "float32", "shape": [2]} for number in range(count)}
    with pytest.raises(OtherModel) as refused:
        check_leaves("5", found, {})
    assert str(refused.value).count("found float32") == min(count, 3)
    assert str(refused.value).partition("; and ")[2] == (f"{count - 3} more" if count > 3 else "")


def read_ahead(stream):
    """What on_step() asks not to be given: batches that were drawn before they are needed."""
    waiting = collections.deque(itertools.islice(stream, 2))
    for batch in stream:
        yield waiting.popleft()
        waiting.append(batch)


@pytest.mark.parametrize("wrap, right", [(iter, True), (read_ahead, False)])
def test_the_position_is_that_of_the_step(tmp_path, key, wrap, right):
    state, stream = make_state(), make_stream()
    with Checkpoints(tmp_path) as run:
        run.resume(state, stream, key)
        batches = itertools.islice(wrap(stream), 4)
        fit(state, batches, key, run.on_step(stream, key, every=4))
    position = manifests.read_manifest(tmp_path / "4")["position"]["json"]
    assert (position == {"next_index": 4}) == right


@pytest.mark.parametrize("position", [b"\x00bytes", {"a": [1, None, 2.5]}, {"base64": "x"}, 3])
def test_positions_come_back(position):
    saved = json.loads(json.dumps(checkpoints.encode_position(position)))
    assert checkpoints.decode_position(saved) == position


@pytest.mark.parametrize("position", [(1, 2), {1: 2}, {"a": float("nan")}, {"a": {1}}])
def test_positions_that_json_would_change_are_refused(tmp_path, fresh, key, position):
    with begun(tmp_path, fresh, key) as run, pytest.raises(TypeError, match="expected what JSON"):
        run.save(fresh, position, key)


def test_old_keys_are_refused(tmp_path, fresh):
    with begun(tmp_path, fresh, jax.random.key(0)) as run, pytest.raises(
            TypeError, match="jax.random.key, found an"):
        run.save(fresh, WHERE, jax.random.PRNGKey(0))


def test_two_runs_are_not_mixed(folder, fresh, key):
    with Checkpoints(folder) as run:
        with pytest.raises(ValueError, match=r"expected resume\(\) before the first save"):
            run.save(fresh, WHERE, key)
        state, _ = run.resume(fresh, make_stream(), key)
        with pytest.raises(ValueError, match="expected a step after 10, .* found step 4"):
            run.save(at(state, 4), WHERE, key)


@pytest.mark.parametrize("bad", [{"keep": 0}, {"every": 0}])
def test_bad_numbers(tmp_path, fresh, key, bad):
    with pytest.raises(ValueError, match="at least 1; found 0"):
        with begun(tmp_path, fresh, key, keep=bad.get("keep", 1)) as run:
            run.on_step(run.stream, key, bad["every"])


def test_on_step_wants_the_stream_that_resume_was_given(tmp_path, fresh, key):
    with begun(tmp_path, fresh, key) as run, pytest.raises(ValueError, match="expected the stream"):
        run.on_step(make_stream(), key, 1)


def test_an_error_of_the_reader_is_not_hidden(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("broken disk")

    monkeypatch.setattr(manifests, "write_manifest", fail)
    with pytest.raises(KeyError) as error:
        train(tmp_path, 4, every=1, after={}.__getitem__)
    assert "While ending the run: NotSaved: step 1" in error.value.__notes__[0]


def test_nothing_is_said_when_all_is_well(tmp_path):
    with warnings.catch_warnings(action="error"):
        train(tmp_path, 6)
        train(tmp_path, 12)


def test_metrics_are_on_disk_before_a_checkpoint_is(tmp_path, monkeypatch):
    seen = []
    write = manifests.write_manifest
    monkeypatch.setattr(manifests, "write_manifest", lambda *a: (
        seen.append((a[1]["step"], runs.read_metrics(tmp_path / "metrics")["loss"])), write(*a)))
    train(tmp_path, 10)
    assert [step for step, _ in seen] == [5, 10]
    assert all(set(losses) >= set(range(1, step + 1)) for step, losses in seen)


def test_a_folder_may_be_a_text(tmp_path):
    (tmp_path / "a").write_bytes(b"1")
    manifests.write_manifest(str(tmp_path), {"step": 3})
    assert manifests.read_manifest(str(tmp_path))["files"].keys() == {"a"}


def test_a_process_that_is_not_the_first_writes_no_progress(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with Checkpoints(tmp_path):
        assert not (tmp_path / "progress").exists()
    monkeypatch.undo()
    with Checkpoints(tmp_path):
        assert (tmp_path / "progress").exists()
