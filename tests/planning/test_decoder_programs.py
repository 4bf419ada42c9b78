"""The decoder's steps compiled for TPUs: how gradients are summed, and the time of each part."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from meshbook.planning import records
from meshbook.planning.clocks import device_of
from meshbook.planning.decoder_programs import (
    NOWHERE, SCATTERED, WHOLE, draw_sums, look, spent_by_part, split_letter, sums_by_split,
    sums_of_gradients, time_by_part,
)
from meshbook.planning.programs import recorded_program
from meshbook.profiling.estimated_runs import estimated_run
from meshbook.sharding import make_mesh

DECODER = records.frame("tpu-decoder")
SMALL = DECODER[DECODER.step.isna()]


@pytest.mark.parametrize("name", SMALL.index)
def test_every_weight_that_is_split_has_one_kind_of_sum(name):
    cell, program = SMALL.cell[name], SMALL.program[name]
    gradients = program.seen["gradients"]
    assert gradients and set(gradients.values()) <= {SCATTERED, WHOLE}
    scattered = program.traffic.along("batch", kind="reduce-scatter").bytes
    assert (scattered > 0) == (SCATTERED in gradients.values())
    if cell["split"] != "D":
        assert any("RHK" in path for path in gradients) or cell["kind"] == "groups"


@pytest.mark.parametrize("letters, split, letter", [
    ("DSF", "D", "D"), ("RHK", "D", None), ("DSF", "last", "F"), ("SRP", "first", "R"),
    ("SRHP", "last", "P"), ("VD", "first", "V")])
def test_the_letter_that_is_split(letters, split, letter):
    assert split_letter(letters, split) == letter


def test_the_letters_are_those_that_the_rules_split():
    from benchmarks.aot_decoder import Gradients

    for split in ("first", "last"):
        rules = Gradients("v5e-8", "bfloat16", split, other="RHK").rules.also(
            L=None, R=None, P=None, G=None)
        for letters in ("DSF", "FD", "HKD", "SRP", "RSHK"):
            spec = (*rules.parameter("L" + letters), *[None] * 5)
            assert spec[1 + letters.index(split_letter(letters, split))] == "batch"
            assert spec.count("batch") == 1
        other = {"first": "last", "last": "first"}[split]
        assert rules.parameter("RHK") == Gradients("v5e-8", "bfloat16", other).rules.also(
            L=None, R=None).parameter("RHK")


def scattered_by_hand(mesh):
    """A program that scatters the sum of one gradient, and sums the other whole."""
    def local(x, y, w):
        one = jax.lax.psum_scatter(x.T @ y, "batch", scatter_dimension=0, tiled=True)
        return one, jax.lax.psum(y.T @ x, "batch") * w

    mapped = jax.shard_map(local, in_specs=(P("batch"), P("batch"), P()),
                           out_specs=(P("batch"), P()))
    with jax.set_mesh(mesh):
        x, y = (jax.ShapeDtypeStruct((32, size), jnp.float32,
                                     sharding=NamedSharding(mesh, P("batch")))
                for size in (16, 24))
        return jax.jit(mapped).lower(x, y, np.float32(2)).compile().as_text()


def test_sums_are_told_by_their_results():
    mesh = make_mesh((8, 1))
    weights = {"a_DF": ((16, 24), (2, 24)), "b_FD": ((24, 16), (3, 16)),
               "other": ((16, 8), (2, 8)), "turned": ((24, 1, 16), (3, 1, 16))}
    assert sums_of_gradients(scattered_by_hand(mesh), mesh, weights) == {
        "a_DF": SCATTERED, "b_FD": WHOLE, "other": NOWHERE, "turned": WHOLE}


def test_parts_of_a_step_make_the_step():
    text, mesh = recorded_program("v5e-8 (8, 1) 256 model=MiniGPT")
    found = look("v5e-8", {}, text, mesh)
    run = estimated_run(text, mesh, device_of("v5e-8"))
    assert found == {"parts": time_by_part(text, mesh, "v5e-8"), "gradients": {}}
    assert sum(found["parts"].values()) == pytest.approx(run.step)
    assert set(found["parts"]) == {"attention", "mlp", "loss", "embed", "update", "other",
                                   "waiting"}
    assert found["parts"]["mlp"] == pytest.approx(1e3 * sum(
        each.end - each.start for each in run.work if "/mlp/" in each.op_name
        and "attention" not in each.op_name))


def test_what_is_not_recorded_is_not_drawn():
    assert draw_sums("v5e-9") is None and sums_by_split("v5e-9", "bfloat16") == {}
    assert spent_by_part(DECODER[:0]) == {}


def test_steps_and_sums_are_as_they_are_recorded():
    now = DECODER.loc[["v5e-8 (8, 1) 64"]].set_axis(["now"])
    (label, parts), = spent_by_part(now).items()
    recorded = now.program["now"].seen["parts"]
    assert label == f"now: MFU {now.mfu['now']:.0%}"
    assert list(parts) == ["attention", "MLP", "loss", "all else", "waiting"]
    assert parts["MLP"] == recorded["mlp"]
    assert all(parts[each] == recorded[each] for each in ("attention", "loss", "waiting"))
    assert parts["all else"] == pytest.approx(sum(
        recorded[each] for each in ("embed", "update", "other")))
    html = draw_sums("v5e-8").html
    shown = [how for dtype in ("bfloat16", "float32")
             for by in sums_by_split("v5e-8", dtype).values() for how in by.values()]
    for how in (SCATTERED, WHOLE):
        assert html.count(f'data-state="{how}"') == shown.count(how) > 0
