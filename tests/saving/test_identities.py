"""Which run a checkpoint is of: what decides a run is in its identity, and nothing else is."""
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from soak import make_state, make_stream, train
from tiny_gpt import tiny_state

from meshbook.data import images, tokens
from meshbook.data.augmentation import Preparation
from meshbook.data.order import Stream
from meshbook.data.token_files import Tokens
from meshbook.data.vocabulary import Identity
from meshbook.models import ViT, ViTConfig
from meshbook.saving import checkpoints, identities, manifests
from meshbook.saving.checkpoints import Checkpoints, OtherRun
from meshbook.saving.identities import differences, identity_of
from meshbook.sharding import Sharding, make_mesh
from meshbook.training import create_state, recipe

KEY = jax.random.key(7)


def vit(row="data_parallel", mesh=None, optimizer=optax.sgd(0.1), **options):
    options = {"prepare": Preparation((0.5,) * 3, (0.25,) * 3, False)} | options
    config = ViTConfig(patch=16, embed=16, hidden=32, heads=2, layers=1, **options.pop("config", {}))
    make = lambda: ViT(config, getattr(Sharding, row)(), rngs=nnx.Rngs(0))
    return create_state(make, optimizer, mesh and make_mesh(mesh), **options)


def pictures(flipped=0):
    inputs = np.zeros((40, 32, 32, 3), np.uint8)
    inputs[3, 2, 1, 0] = flipped
    return images.Images(inputs, np.zeros(40, np.int32))


def stories(sha256="a" * 64):
    return Tokens(np.arange(100, dtype=np.uint16), np.array([0, 100]),
                  Identity("none", 1 << 16, ""), sha256)


def image_batches(data=None, batch_size=8, seed=1, **options):
    return images.batches(data or pictures(), batch_size, seed, **options)


def token_batches(data=None, B=4, T=8, seed=1, **options):
    return tokens.batches(data or stories(), B, T, seed, **options)


def changed(one, other):
    """The names that two identities do not share."""
    return {line.partition(":")[0] for line in differences(one, other)}


STREAMS = {
    "data/sha256": (image_batches, dict(data=pictures(flipped=1))),
    "data/batch_size": (image_batches, dict(batch_size=16)),
    "data/seed": (image_batches, dict(seed=2)),
    "data/B": (token_batches, dict(B=2)),
    "data/T": (token_batches, dict(T=9)),
    "data/documents": (token_batches, dict(documents=True)),
}


@pytest.mark.parametrize("name", STREAMS)
def test_what_decides_the_batches_is_in_a_streams_identity(name):
    make, other = STREAMS[name]
    assert changed({"data": make().identity}, {"data": make(**other).identity}) == {name}
    assert json.loads(json.dumps(make().identity)) == make().identity


def test_a_token_files_own_hash_is_the_datas():
    assert token_batches(stories("b" * 64)).identity["sha256"] == "b" * 64
    assert token_batches(seed=2).identity["seed"] == 2


@pytest.mark.parametrize("make, other", [
    (image_batches, dict(epochs=3)), (image_batches, dict(process_index=1, process_count=2)),
    (token_batches, dict(epochs=3))])
def test_what_does_not_decide_a_batch_is_not(make, other):
    assert make().identity == make(**other).identity


RATES = jnp.array([0.1, 0.2, 0.3])
OPTIMIZERS = {
    "the recipe": recipe(100),
    "a longer schedule": recipe(110),
    "another peak": recipe(100, peak=3e-3),
    "b2": optax.adamw(1e-3, b2=0.98),
    "another b2": optax.adamw(1e-3, b2=0.99),
    "weight decay": optax.adamw(1e-3, b2=0.98, weight_decay=0.1),
    "a mask": optax.adamw(1e-3, b2=0.98, mask=lambda p: {n: n == "w_XF" for n in p}),
    "clipping": optax.chain(optax.clip_by_global_norm(1.0), recipe(100)),
    "clipping elsewhere": optax.chain(optax.clip_by_global_norm(2.0), recipe(100)),
    "an array": optax.sgd(lambda count: RATES[count]),
    "another array": optax.sgd(lambda count: (2 * RATES)[count]),
    "within a jit": optax.sgd(jax.jit(lambda count: (3 * RATES)[count])),
    "an array without an axis": optax.sgd(jnp.float32(0.1)),
    "another of those": optax.sgd(jnp.float32(0.2)),
    "Lion": optax.lion(1e-3),
}


def optimizer_identity(optimizer, mesh=(4, 2)):
    return identities.optimizer_of(make_state(mesh, optimizer=optimizer))


def test_no_two_optimizers_are_alike():
    found = [optimizer_identity(each)["sha256"] for each in OPTIMIZERS.values()]
    assert len(set(found)) == len(OPTIMIZERS)


def test_an_optimizer_is_the_same_on_every_mesh_and_within_one():
    found = [optimizer_identity(recipe(100), mesh) for mesh in ((4, 2), (8, 1), None)]
    with jax.set_mesh(make_mesh((4, 2))):
        found.append(optimizer_identity(recipe(100)))
    assert all(each == found[0] for each in found)


def test_a_changed_learning_rate_can_be_read():
    one, other = (optimizer_identity(optax.sgd(rate)) for rate in (0.25, 0.5))
    assert differences(one, other)[:2] == ["constants/-0.25: expected none, found 2",
                                           "constants/-0.5: expected 2, found none"]


def test_an_identity_is_the_same_in_another_process():
    script = """if True:
        import json, jax
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 8)
        import test_identities as test
        print(json.dumps(test.everything()))"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "5"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                          env=environment, cwd=os.path.dirname(__file__))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == everything()


def everything():
    return identity_of(vit(optimizer=recipe(100)), image_batches(), KEY)


def test_the_model_is_its_configuration_and_not_its_sharding():
    one = identity_of(vit(), image_batches(), KEY)
    assert one["model"]["heads"] == 2 and one["prepare"]["mean"] == [0.5] * 3
    assert identity_of(vit("fully_sharded", (4, 2)), image_batches(), KEY) == one
    gpt = identities.model_of(tiny_state().program)
    assert gpt["tokens"] == 16 and json.loads(json.dumps(gpt)) == gpt


@pytest.mark.parametrize("options, name", [
    (dict(config=dict(dropout=0.25)), "model/dropout"),
    (dict(prepare=Preparation((0.4,) * 3, (0.25,) * 3, False)), "prepare/mean")])
def test_another_configuration_is_seen(options, name):
    assert changed(*(identity_of(state, image_batches(), KEY)
                     for state in (vit(), vit(**options)))) == {name}


class Noisy(nnx.Module):
    """A model without a configuration: its attributes are all it says."""

    def __init__(self, rate):
        self.w, self.rate, self.make = nnx.Param(jnp.zeros(3)), rate, dict

    def __call__(self, inputs, key=None):
        return inputs @ self.w[...]


def test_a_model_without_a_configuration_has_its_attributes():
    state = create_state(lambda: Noisy(0.1), optax.sgd(0.1))
    assert identities.model_of(state.program) == {"rate": 0.1}


def test_plain_values():
    def local():
        pass

    assert identities.plain({"a": (1, 2.5, None, "x", jnp.bfloat16, np.dtype("int8"))}) == {
        "a": [1, 2.5, None, "x", "bfloat16", "int8"]}
    assert identities.plain(partial(local, 3, b=4)) == ["test_plain_values.<locals>.local", 3,
                                                        {"b": 4}]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    train(folder, 5)
    return folder


def other_data():
    stream = make_stream()
    pixels = stream.data.inputs.copy()
    pixels[0, 0, 0] ^= 1
    return Stream(stream.batches, images.Images(pixels, stream.data.labels), **stream.settings)


OTHERS = {
    "data/batch_size: expected 4, found 8": lambda: (
        make_state(), images.batches(make_stream().data, 4, seed=1), KEY),
    "data/seed: expected 2, found 1": lambda: (
        make_state(), images.batches(make_stream().data, 8, seed=2), KEY),
    "data/sha256: expected '[0-9a-f]{64}', found '[0-9a-f]{64}'": lambda: (
        make_state(), other_data(), KEY),
    "optimizer/constants/99: expected 1, found none": lambda: (
        make_state(fatal=99), make_stream(), KEY),
    r"key/data: expected \[0, 8\], found \[0, 7\]": lambda: (
        make_state(), make_stream(), jax.random.key(8)),
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_run_is_refused_with_what_differs(saved, what):
    before = sorted(saved.rglob("*"))
    with Checkpoints(saved) as run, pytest.raises(OtherRun, match=f"5 is of another run: .*{what}"):
        run.resume(*OTHERS[what]())
    assert [path for path in sorted(saved.rglob("*")) if "events" not in path.name] == [
        path for path in before if "events" not in path.name]


def test_a_refused_run_cannot_save(saved):
    with Checkpoints(saved) as run:
        state, stream, _ = OTHERS["data/seed: expected 2, found 1"]()
        with contextlib.suppress(OtherRun):
            run.resume(state, stream, KEY)
        with pytest.raises(ValueError, match="expected resume"):
            run.save(state, stream.get_state(), KEY)


def test_another_mesh_is_no_other_run(saved):
    with warnings.catch_warnings(action="error"), Checkpoints(saved) as run:
        state, _ = run.resume(make_state((2, 4)), make_stream(), KEY)
    assert int(state.step) == 5


def test_restore_asks_only_whether_the_leaves_fit(saved):
    assert int(checkpoints.restore(saved, make_state(fatal=99)).step) == 5


@pytest.mark.parametrize("package, optimizer_counts", [("jax", False), ("numpy", True)])
def test_other_versions_are_a_warning(saved, monkeypatch, package, optimizer_counts):
    here = identities.versions()
    assert set(here) == {"python", *identities.PACKAGES}
    monkeypatch.setattr(identities, "versions", lambda: here | {package: "99.0"})
    warned = pytest.warns(UserWarning, match=f"{package}: expected '99.0', found '{here[package]}'")
    with Checkpoints(saved) as run, warned:
        state, _ = run.resume(make_state(), make_stream(), KEY)
    refused = pytest.raises(OtherRun) if optimizer_counts else contextlib.nullcontext()
    with Checkpoints(saved) as run, pytest.warns(UserWarning), refused:
        run.resume(make_state(fatal=99), make_stream(), KEY)
    with Checkpoints(saved) as run, pytest.warns(UserWarning), pytest.raises(OtherRun):
        run.resume(make_state(), make_stream(), jax.random.key(8))


@pytest.mark.parametrize("stream", [iter([]), make_stream().batches])
def test_a_stream_without_an_identity_is_refused(tmp_path, stream):
    with Checkpoints(tmp_path) as run, pytest.raises(TypeError, match="expected a stream whose"):
        run.resume(make_state(), stream, KEY)


def test_an_identity_that_json_would_change_is_refused(tmp_path):
    stream = Stream(make_stream().batches, make_stream().data, seed=(1, 2))
    with Checkpoints(tmp_path) as run, pytest.raises(TypeError, match="expected what JSON"):
        run.resume(make_state(), stream, KEY)


def test_a_run_keeps_the_key_that_it_began_with(tmp_path):
    """A loop that changes its key as it goes on resumes with the first one."""
    with Checkpoints(tmp_path) as run:
        state, key = run.resume(make_state(), make_stream(), KEY)
        run.save(dataclasses.replace(state, step=state.step + 1), {"next_index": 1},
                 jax.random.fold_in(key, 1))
    with Checkpoints(tmp_path) as run:
        _, key = run.resume(make_state(), make_stream(), KEY)
    assert (jax.random.key_data(key) == jax.random.key_data(jax.random.fold_in(KEY, 1))).all()
    assert manifests.read_manifest(tmp_path / "1")["identity"]["key"]["data"] == [0, 7]


@pytest.mark.parametrize("count", [1, 5, 6, 9])
def test_of_what_differs_five_are_named_and_the_rest_is_counted(count):
    manifest = {"identity": {"data": dict.fromkeys("abcdefghi"[:count])},
                "versions": identities.versions()}
    with pytest.raises(OtherRun) as refused:
        identities.check_run("5", manifest, {"data": {}})
    said = str(refused.value).partition(". A run with")[0]
    assert said.count("found None") == min(count, 5)
    assert said.partition("; and ")[2] == (f"{count - 5} more" if count > 5 else "")
