"""The decoder's steps compiled for TPUs: the record agrees with the formulas and with itself."""
import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from meshbook.costs.plans import Plan
from meshbook.costs.step import describe
from meshbook.costs.traffic import step_traffic
from meshbook.costs.work import step_work
from meshbook.planning import decoder_programs
from meshbook.planning.clocks import device_of
from meshbook.planning.decoder_programs import (
    NOWHERE, SCATTERED, WHOLE, Recorded, draw_decoder_steps, draw_sums, look, recorded_decoders,
    split_letter, sums_by_split, sums_of_gradients, time_by_part,
)
from meshbook.planning.programs import recorded_program
from meshbook.planning.topologies import Compilation
from meshbook.profiling.estimated_runs import estimated_run
from meshbook.sharding import make_mesh

RECORD = recorded_decoders()
LARGE = [name for name in RECORD if not name.startswith("gradients")]
SMALL = [name for name in RECORD if name.startswith("gradients")]
TIMED = [name for name in LARGE if RECORD[name].program.clock]


def test_the_record_has_the_programs_that_the_command_compiles_each_as_it_says():
    from benchmarks import aot_decoder

    cells = {cell.name: cell for cell in aot_decoder.cells()}
    assert list(RECORD) == [name for name in cells if name in RECORD] and RECORD
    for name, found in RECORD.items():
        assert found.cell == json.loads(json.dumps(dataclasses.asdict(cells[name]))), name
        assert found.program.topology == found.cell["tpu"]
    assert len({tuple(found.program.versions.items()) for found in RECORD.values()}) == 1


def test_dense_layers_multiply_as_much_as_the_active_experts():
    from benchmarks import aot_decoder

    D, F, routed, layers = 768, 3072, 2, 6
    of_six = (layers - 1) * 2 * D * F + routed * 2 * D * F + D * 2 * D  # and two shared, D to D
    assert layers * 2 * D * aot_decoder.NOW.hidden == of_six


@pytest.mark.parametrize("name", TIMED)
def test_the_work_is_that_of_the_formula(name):
    found = RECORD[name]
    rows, ways = found.cell["shape"]
    step = describe(found.config, Plan(rows, model=ways, rules=found.cell["row"]),
                    found.cell["batch"])
    done, again = step_work(step).done, 0
    if found.cell["tpu"].startswith("v6e"):  # whose compiler keeps no scores of a row
        again = 2 * sum(each.flops for each in step.placed if "U" in each.row.made)
    assert found.program.flops == pytest.approx(done + again, rel=1e-3) or (
        found.program.rematerialised and found.program.flops > done)


@pytest.mark.parametrize("name", TIMED)
def test_utilisation_is_useful_work_over_what_the_chip_could_do(name):
    found = RECORD[name]
    device = device_of(found.cell["tpu"])
    most = device.flops * found.program.clock["step"] / 1e3 * math.prod(found.cell["shape"])
    useful = step_work(describe(found.config, Plan(), found.cell["batch"])).useful
    assert found.utilisation == pytest.approx(useful / most)
    assert 0.05 < found.utilisation < found.program.flops / (most / math.prod(found.cell["shape"]))
    assert sum(found.parts.values()) == pytest.approx(found.program.clock["step"], rel=1e-6)
    assert -1e-6 < found.parts["waiting"] >= found.program.clock["exposed"] - 1e-6


@pytest.mark.parametrize("name", [name for name in TIMED if RECORD[name].cell["shape"] == [8, 1]
                                  and RECORD[name].cell["row"] == "fully_sharded"
                                  and RECORD[name].cell["regather"] is None
                                  and RECORD[name].cell["dtype"] == "bfloat16"])
def test_weights_are_gathered_in_bfloat16_by_the_formula(name):
    found = RECORD[name]
    times = 1 / 2 if found.cell["parts"] else 1  # gathered once, before the first of the parts
    key, plan = ("all-gather", ("batch",)), Plan(**found.program.mesh, rules="fully_sharded")
    expected = step_traffic(describe(found.config, plan, found.cell["batch"]), 2, True)[key].bytes
    assert found.program.traffic[key].bytes == pytest.approx(expected * times, rel=2e-3)


def test_useful_work_is_that_of_one_device_and_nothing_is_counted_twice():
    from benchmarks import aot_decoder

    cell = dataclasses.asdict(aot_decoder.NOW)
    clock = {"step": 1e3, "exposed": 0.0}
    found = Recorded(cell, Compilation("v5e-8", {}, True, 1, clock=clock))
    T, D, V, H = 1024, 768, 100_277, 12
    turned = 2 * 2 * 128 * 128 * (1 + H)  # two matrices each, from the latents to the turned parts
    layer = 2 * D * 256 + 2 * 128 * 3 * D + 2 * D * D + 2 * 2 * D * 3712 + 2 * T * 2 * D
    forward = 48 * layer + 40 * (turned + 2 * T * H * 128) + 2 * D * V
    assert found.useful == 3 * forward * 8 * T  # rows of a device
    assert found.utilisation == pytest.approx(3 * forward * 8 * T / 197e12)
    assert Recorded(cell, Compilation("v5e-8", {}, False, 1)).utilisation is None


NOW, UNTUNED = "v5e-8 (8, 1) 64", "v5e-8 (8, 1) 64 remat=all by_row=False"


@pytest.mark.parametrize("name", {NOW} & set(RECORD))
def test_a_v5e_is_used_by_three_tenths_and_more(name):
    assert RECORD[name].utilisation > 0.3


@pytest.mark.parametrize("before, now", [(UNTUNED, NOW)] if {UNTUNED, NOW} <= set(RECORD) else [])
def test_what_was_changed_for_a_tpu_changes_its_clock_and_no_useful_work(before, now):
    before, now = RECORD[before], RECORD[now]
    assert now.utilisation > 1.5 * before.utilisation and now.useful == before.useful


@pytest.mark.parametrize("name", SMALL)
def test_every_weight_that_is_split_has_one_kind_of_sum(name):
    found = RECORD[name]
    assert found.gradients and set(found.gradients.values()) <= {SCATTERED, WHOLE}
    scattered = found.program.traffic.along("batch", kind="reduce-scatter").bytes
    assert (scattered > 0) == (SCATTERED in found.gradients.values())
    if found.cell["split"] != "D":
        assert any("RHK" in path for path in found.gradients) or found.cell["kind"] == "groups"


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


def test_what_is_not_recorded_is_not_drawn(tmp_path, monkeypatch):
    assert draw_decoder_steps({"one": "v5e-8 (8, 1) 65"}) is None
    assert draw_sums("v5e-9") is None and sums_by_split("v5e-9", "bfloat16") == {}
    monkeypatch.setattr(decoder_programs, "RESULTS", tmp_path)
    assert recorded_decoders() == {}


def test_steps_and_sums_are_drawn_as_they_are_recorded():
    for name in TIMED[:1]:
        drawn, step = draw_decoder_steps({"now": name}), RECORD[name]
        assert f"MFU {step.utilisation:.0%}" in drawn.html
        assert f"{step.program.clock['step']:.0f} ms" in drawn.alt
    tpu = RECORD[SMALL[0]].cell["tpu"]
    html = draw_sums(tpu).html
    shown = [how for dtype in ("bfloat16", "float32") for by in sums_by_split(tpu, dtype).values()
             for how in by.values()]
    for how in (SCATTERED, WHOLE):
        assert html.count(f'data-state="{how}"') == shown.count(how)
