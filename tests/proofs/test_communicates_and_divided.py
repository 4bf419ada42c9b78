"""What a program communicates, how its work is divided, what it donates: each proof's answers."""
import contextlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from tiny_mlp import B, BATCHES, D, F, SPECS, STEP, mesh_of, put, step, weights

from meshbook import proofs
from meshbook.proofs import ProofFailed


@pytest.fixture(scope="module")
def mesh():
    return mesh_of()


@pytest.fixture(scope="module")
def compiled(mesh):
    rows = jax.device_put(BATCHES[0], NamedSharding(mesh, P("batch")))
    return STEP.lower(put(weights(), mesh, SPECS), rows).compile()


RIGHT = {("all-reduce", "model"): (1, 4 * (B // 4) * D),
         ("all-reduce", ("batch",)): (1, 4 * (D * F + 1))}


def test_predictions_hold_or_are_named(compiled, mesh):
    verdict = proofs.assert_communicates(compiled, mesh, RIGHT)
    assert repr(verdict) == ("communicates as predicted: all-reduce along batch 8.20 kB in 1; "
                             "all-reduce along model 512 B in 1")
    proofs.assert_communicates(compiled, mesh, RIGHT | {
        ("all-reduce", "model"): proofs.Moved(None, 512), ("all-to-all", "model"): (0, 0)})


@pytest.mark.parametrize("expected, message", [
    (RIGHT | {("all-reduce", ("batch",)): (1, 8192)},
     "all-reduce along batch: expected 1 with 8,192 bytes of results on one device, "
     "found 1 with 8,196 bytes"),
    (RIGHT | {("all-reduce", "model"): (2, 512)},
     "along model: expected 2 with 512 bytes.*found 1 with 512 bytes"),
    (RIGHT | {("all-reduce", "model"): (None, 256)}, "along model: expected 256 bytes .*found 1"),
    ({("all-reduce", "model"): (1, 512)}, "along batch: expected 0 with 0 bytes.*found 1 with"),
    (RIGHT | {("all-reduce", ("model", "batch")): (1, 4)},
     "along batch, model: expected 1 with 4 bytes.* found 0 with 0 bytes"),
    ({("all-gather", "model"): (1, 512), ("all-reduce", "batch"): (1, 8196)},
     "all-gather along model: expected 1 with 512 bytes.*found 0 with 0 bytes"),
])
def test_a_prediction_that_does_not_hold_is_named(compiled, mesh, expected, message):
    with pytest.raises(ProofFailed, match=message):
        proofs.assert_communicates(compiled, mesh, expected)


def test_an_all_gather_is_no_all_reduce_of_as_many_bytes(mesh):
    """Both leave (B, D) on each device; the gather is of halves that nothing had to add."""
    places = lambda *specs: tuple(NamedSharding(mesh, spec) for spec in specs)
    x = jax.ShapeDtypeStruct((B, D), jnp.float32)
    gathered = jax.jit(jnp.sin, in_shardings=places(P(None, "model")),
                       out_shardings=places(P())[0]).lower(x).compile()
    proofs.assert_communicates(gathered, mesh, {("all-gather", "model"): (1, 4 * B * D)})
    with pytest.raises(ProofFailed, match="all-gather along model: expected 0 with 0 bytes"):
        proofs.assert_communicates(gathered, mesh, {("all-reduce", "model"): (1, 4 * B * D)})


@pytest.mark.parametrize("expected, message", [
    ({("all-reduce", "modle"): (1, 1)}, "expected axes among batch, model, found 'modle'"),
    ({("allreduce", "model"): (1, 1)}, "expected a kind among all-gather, all-reduce, .*found 'allreduce'"),
    ({"model": 512}, r"expected \{\(kind, axes\): \(count, bytes\)\}, found 'model': 512"),
    ({("all-reduce", "model"): 512}, r"found \('all-reduce', 'model'\): 512"),
])
def test_a_prediction_of_what_does_not_exist_is_refused(compiled, mesh, expected, message):
    with pytest.raises(ValueError, match=message):
        proofs.assert_communicates(compiled, mesh, expected)


def test_traffic_prints_as_a_table(compiled, mesh):
    moved = proofs.collectives(compiled, mesh)
    assert repr(moved).splitlines() == [
        "collective  along  count  result bytes per device  wire bytes per device",
        "all-reduce  batch      1                    8,196                 12,294",
        "all-reduce  model      1                      512                    512",
    ]
    assert "| all-reduce | batch | 1 | 8,196 | 12,294 |" in moved._repr_markdown_()
    assert moved.total == (2, 8708) and moved.along("model") == (1, 512)
    assert moved.along("batch", "model") == moved.along("model", kind="all-gather") == (0, 0)
    opened = proofs.Traffic({**moved, ("all-gather", ("batch",)): proofs.Moved(None, 5)})
    assert opened.total == (None, 8713) and opened.along("model") == (1, 512)
    assert repr(opened).splitlines()[-1].split() == ["all-gather", "batch", "?", "5", "?"]
    assert repr(proofs.collectives(jax.jit(jnp.sin).lower(1.0).compile(), None)) == "no collectives"


def test_a_program_of_one_device_proves_nothing_of_a_mesh(mesh):
    alone = jax.jit(lambda x: (x @ x.T).sum()).lower(jnp.ones((8, 8))).compile()
    with pytest.raises(ValueError, match="of 1 device; found a mesh of 8"):
        proofs.assert_communicates(alone, mesh, {})
    for own in None, mesh_of((1, 1)):
        assert "nothing" in repr(proofs.assert_communicates(alone, own, {}))


@pytest.mark.parametrize("shardy", [True, False])
def test_a_program_that_is_still_to_be_divided_is_refused(mesh, shardy):
    places = lambda *spec: NamedSharding(mesh, P(*spec))
    x = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    total = jax.shard_map(lambda x: jax.lax.psum(x, "batch"), mesh=mesh, in_specs=P("batch"),
                          out_specs=P())
    with shardy_is(shardy):
        for made in (jax.jit(jnp.dot, in_shardings=(places(None, "model"), places("model")))
                     .lower(x, x), jax.jit(total).lower(x)):
            text = made.as_text(dialect="hlo")
            for question in (proofs.work, lambda text: proofs.collectives(text, mesh),
                             lambda text: proofs.assert_communicates(text, mesh, {})):
                with pytest.raises(ValueError, match="still to be divided over devices, with"):
                    question(text)
            proofs.collectives(made.compile(), mesh)
    assert proofs.work(jax.jit(jnp.dot).lower(x, x).as_text(dialect="hlo")) == 2 * 16**3


@contextlib.contextmanager
def shardy_is(on):
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", on)
    yield
    jax.config.update("jax_use_shardy_partitioner", before)


def test_devices_are_numbered_as_the_program_does_where_no_argument_lies_on_a_mesh():
    """The mesh stands in constraints alone: with the axes exchanged, each device is where it was."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))

    def f(x, out):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("a", "b")))
        return jax.lax.with_sharding_constraint(jnp.sum(x**2, 0), NamedSharding(mesh, out))

    for out in P("b"), None:
        step = lambda x: f(x, out) if out else f(x, P("b")) * 2
        made = jax.jit(step).lower(jax.ShapeDtypeStruct((8, 16), jnp.float32)).compile()
        for same in (mesh, Mesh(mesh.devices.T, ("b", "a")),
                     Mesh(mesh.devices[::-1, ::-1], ("a", "b"))):
            assert list(proofs.collectives(made, same)) == [("all-reduce", ("a",))]


def test_the_work_is_divided_or_both_figures_are_named(compiled):
    useful = 5 * 2 * B * D * F  # the input needs no gradient
    verdict = proofs.assert_divided(compiled, 8, useful)
    assert repr(verdict) == "work divided: 41.0 kFLOP per device x 8 = 1.000 x 328 kFLOP useful"
    with pytest.raises(ProofFailed, match=r"expected 1.333 x the useful FLOPs over 8.*found 41"):
        proofs.assert_divided(compiled, 8, useful, factor=4 / 3)


def test_a_state_is_donated_or_both_figures_are_named(compiled, mesh):
    held = 4 * 2 * D * F // 2
    verdict = proofs.assert_donated(compiled, held)
    assert repr(verdict) == "donated: 8.19 kB per device, all of the state"
    assert verdict.bytes == held
    with pytest.raises(ProofFailed, match="expected the 8,193 bytes .*found 8,192 bytes aliased"):
        proofs.assert_donated(compiled, held + 1)
    rows = jax.device_put(BATCHES[0], NamedSharding(mesh, P("batch")))
    kept = jax.jit(step).lower(put(weights(), mesh, SPECS), rows).compile()
    with pytest.raises(ProofFailed, match="found 0 bytes aliased"):
        proofs.assert_donated(kept, held)


STATE = {"m": np.ones((8, 4), np.float32), "p": np.ones((8, 4), np.float32)}
ADDED = lambda state, x: (jax.tree.map(lambda leaf: leaf + 1, state), x * 2)
HELD = 2 * 4 * 32


def donating(step=ADDED, x=np.ones((16, 4), np.float32), **settings):
    return jax.jit(step, **settings).lower(STATE, x).compile()


def test_another_arguments_memory_is_not_the_states():
    proofs.assert_donated(donating(donate_argnums=0), HELD)
    with pytest.raises(ProofFailed, match="all leaves of the state to be donated, found m, p kept, "
                                          "2 leaves in all; the 256 bytes that are aliased"):
        proofs.assert_donated(donating(donate_argnums=1), HELD)
    verdict = proofs.assert_donated(donating(donate_argnums=(0, 1)), HELD)
    assert verdict.bytes == HELD  # of the state alone
    both = donating(donate_argnums=(0, 1))
    assert proofs.assert_donated(both, 2 * HELD, state=(0, 1)).bytes == 2 * HELD
    with pytest.raises(ProofFailed, match="expected the 257 bytes .*found 256 bytes aliased"):
        proofs.assert_donated(both, HELD + 1)
    proofs.assert_donated(donating(donate_argnums=1), HELD, state=1)


def test_what_is_donated_and_not_used_again_is_not_counted():
    """The state is donated, and its new one is in half precision: the batch's memory is not it."""
    half = lambda state, x: (jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state), x * 2)
    with pytest.raises(ProofFailed, match="expected the 256 bytes .*found 0 bytes aliased"):
        proofs.assert_donated(donating(half, donate_argnums=(0, 1)), HELD)
    unused = lambda state, x: ({"m": state["m"] + 1}, x * 2)
    with pytest.raises(ValueError, match="found 1 more donated leaves, and only 2 of 3 leaves used"):
        proofs.assert_donated(donating(unused, donate_argnums=(0, 1)), HELD // 2)
    assert proofs.assert_donated(
        donating(unused, donate_argnums=(0, 1), keep_unused=True), HELD // 2).bytes == HELD // 2


def test_no_work_and_no_state_are_no_proof(compiled):
    for what in dict(useful=0), dict(useful=1.0, factor=0.0):
        with pytest.raises(ValueError, match="useful work and a factor above 0"):
            proofs.assert_divided(compiled, 8, **what)
    with pytest.raises(ValueError, match="a state of at least one byte, found 0"):
        proofs.assert_donated(compiled, 0)


def test_a_state_may_be_any_argument_and_must_be_one():
    static = jax.jit(lambda kind, x, state: ADDED(state, x), static_argnums=0, donate_argnames="state")
    made = static.lower("kind", STATE["m"], state=STATE).compile()
    proofs.assert_donated(made, HELD, state="state")
    with pytest.raises(ProofFailed, match="expected all leaves .* found the array kept"):
        proofs.assert_donated(made, HELD // 2)
    with pytest.raises(ValueError, match="arguments of the step, 0, state .*; found 1"):
        proofs.assert_donated(made, HELD, state=1)


def test_the_proofs_import_only_jax_and_numpy():
    code = ("import sys, meshbook.proofs; others ='flax', 'torch', 'optax', 'grain', 'matplotlib'; "
            "print([name for name in others if name in sys.modules])")
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
