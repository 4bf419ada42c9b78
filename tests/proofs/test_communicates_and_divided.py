"""What a program communicates, how its work is divided, what it donates: each proof's answers."""
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
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
    assert repr(proofs.collectives(jax.jit(jnp.sin).lower(1.0).compile(), mesh)) == "no collectives"


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


def test_the_proofs_import_only_jax_and_numpy():
    code = ("import sys, meshbook.proofs; others ='flax', 'torch', 'optax', 'grain', 'matplotlib'; "
            "print([name for name in others if name in sys.modules])")
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
