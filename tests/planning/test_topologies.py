"""Programs for TPUs that are not here: what is recorded, what is reported, what is refused."""
import dataclasses
import gzip
import json
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from meshbook.costs.devices import DEVICES
from meshbook.costs.plans import Plan
from meshbook.costs.step import describe
from meshbook.costs.traffic import step_traffic
from meshbook.costs.work import step_work
from meshbook.hlo import module
from meshbook.hlo.collectives import Moved, Traffic
from meshbook.models import ViTConfig
from meshbook.planning import topologies
from meshbook.planning.decoder_programs import SCATTERED, WHOLE, look
from meshbook.planning.topologies import (
    Compilation, compile_for, operations, rematerialised, tpu_mesh,
)
from meshbook.profiling.estimated_runs import estimated_run
from meshbook.sharding import make_mesh

ROOT = Path(__file__).parents[2]
RECORD = {name: Compilation.of_record(fields) for name, fields in
          json.loads((ROOT / "results" / "tpu.json").read_text())["cells"].items()}
compiler = pytest.mark.skipif(not topologies.installed(), reason="libtpu is not installed")
REPEATED = ["v2-8 (8, 1) 128", "v2-8 (4, 2) 128", "v5e-8 (8, 1) 128", "v6e-8 (8, 1) 128",
            "v2-8 none 4096", "v5e-8 (8, 1) 64 model=MiniGPT"]
X = jax.ShapeDtypeStruct((256, 256), jnp.float32)
BIG = jax.ShapeDtypeStruct((2**16, 2**16), jnp.float32)  # 17 GB


@jax.jit
def product(x):
    return x @ x


def cell(name):
    """(config, shape, batch, what is special) from a cell's name."""
    tpu, _, rest = name.partition(" ")
    shape, _, rest = rest.partition(") ") if rest.startswith("(") else rest.partition(" ")
    batch, *special = rest.split()
    shape = None if shape == "none" else tuple(map(int, shape.strip("()").split(",")))
    special = dict(each.split("=") for each in special)
    embed = int(special.get("embed", 384))
    return ViTConfig(embed=embed, hidden=4 * embed), shape, int(batch), special


PLAIN = [name for name in RECORD if not (
    {"layout", "checkpoint", "row", "model"} & set(cell(name)[3]))]


def test_the_record_is_whole_and_of_one_compiler():
    from benchmarks import aot

    assert list(RECORD) == [cell.name for cell in aot.cells()] == [
        cell.name for cell in aot.chosen_by(["all"])]
    assert len({tuple(found.versions.items()) for found in RECORD.values()}) == 1


def test_without_words_the_experiments_are_compiled_with_words_what_they_name():
    from benchmarks import aot

    nine = {(shape, batch) for shape in ((4, 2), (8, 1), None) for batch in (128, 1024, 4096)}
    asked = {tpu: nine for tpu in ("v2-8", "v5e-8", "v6e-8")}
    asked |= {tpu: {each for each in nine if each[0] is None} for tpu in ("v3-8", "v5p")}
    chosen = aot.chosen_by([])
    assert len(chosen) == 33 == len({(cell.tpu, cell.shape, cell.batch) for cell in chosen})
    for tpu, experiments in asked.items():
        assert {(cell.shape, cell.batch) for cell in chosen if cell.tpu == tpu} == experiments
    assert {cell.tpu for cell in aot.chosen_by(["v5p", "v4"])} == {"v5p", "v4:2x4x4"}
    assert not aot.chosen_by(["v7"])


def test_a_run_of_some_cells_says_which_and_leaves_the_others_their_provenance():
    from benchmarks import aot

    names = [cell.name for cell in aot.cells()]
    old, new, last = ({"commit": each} for each in ("old", "new", "last"))
    whole = aot.merged(None, dict.fromkeys(reversed(names), 1), old)
    assert whole == {"provenance": old, "cells": dict.fromkeys(names, 1)}
    assert list(whole["cells"]) == names
    some = aot.merged(whole, dict.fromkeys(names[:2], 2), new)
    assert some["provenance"] == old and some["later"] == [new | {"cells": names[:2]}]
    assert list(some["cells"].values()) == [2, 2] + [1] * len(names[2:])
    again = aot.merged(some, {names[1]: 3}, last)
    assert again["later"] == [new | {"cells": names[:1]}, last | {"cells": names[1:2]}]
    assert aot.merged(again, dict.fromkeys(names, 4), last) == {
        "provenance": last, "cells": dict.fromkeys(names, 4)}


@pytest.mark.parametrize("name", PLAIN)
def test_the_record_has_the_work_and_the_traffic_of_the_formulas(name):
    config, shape, batch, _ = cell(name)
    found = RECORD[name]
    if not found.fits:
        return
    rows, ways = shape or (1, 1)
    step = describe(config, Plan(rows, model=ways, rules="tensor_parallel"), batch)
    done = step_work(step).done
    assert found.flops == pytest.approx(done, rel=0.005) or (
        found.rematerialised and found.flops > done)
    if shape is None:
        assert not found.traffic
        return
    expected = step_traffic(step)
    assert found.traffic.keys() == expected.keys()
    for key, predicted in expected.items():
        assert found.traffic[key].count == predicted.count
        assert found.traffic[key].bytes == pytest.approx(predicted.bytes, rel=0.005)


def test_a_device_holds_its_arguments_at_least_and_what_is_asked_for_at_most():
    for name, cell in RECORD.items():
        assert (cell.held is None) == (not cell.fits), name
        assert not cell.fits or cell.arguments < cell.held <= cell.peak, name
    cell = RECORD["v5e-8 (8, 1) 128"]
    assert cell.live > cell.peak == cell.held  # the chip's own memory was counted, too
    assert dataclasses.replace(cell, live=cell.peak - 1).held == cell.peak - 1


def test_the_ninth_experiment_does_not_fit_and_is_made_to_fit():
    ninth = RECORD["v2-8 none 4096"]
    assert not ninth.fits and ninth.peak > ninth.available == pytest.approx(7.48 * 2**30, rel=0.01)
    ample = RECORD["v5p none 4096"]
    assert ample.fits and ample.rematerialised == 0 and ample.peak > 3 * ninth.available
    checkpointed = RECORD["v2-8 none 4096 checkpoint=True"]
    assert ninth.available < checkpointed.peak < 1.1 * ninth.available < 0.6 * ninth.peak
    for special in ("parts=8", "checkpoint=True parts=2"):
        found = RECORD[f"v2-8 none 4096 {special}"]
        assert found.fits and found.peak < ninth.available


def test_what_is_recorded_comes_back():
    traffic = Traffic({("all-reduce", ("batch",)): Moved(1, 4096)})
    one = Compilation("v2-8", {"batch": 8}, True, 2**20, traffic=traffic, operations={"dot": 2})
    again = Compilation.of_record(json.loads(json.dumps(one.record())))
    assert again == one and again.traffic.along("batch").bytes == 4096


@pytest.mark.parametrize("message, numbers", [
    ("RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
     "(32.00G) exceeds available HBM (7.48G).", (32 * 2**30, math.ceil(7.48 * 2**30))),
    ("RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
     "Used 15.35G of 7.48G hbm. Exceeded hbm capacity by 7.87G.",
     (math.ceil(15.35 * 2**30), math.ceil(7.48 * 2**30)))])
def test_both_numbers_of_a_shortage_are_read(message, numbers):
    assert topologies.shortage(message) == numbers


def test_another_failure_of_the_compiler_is_not_taken_for_a_shortage():
    with pytest.raises(RuntimeError, match="refused the program: INTERNAL: oops"):
        topologies.shortage("INTERNAL: oops")


def test_operations_are_counted_outside_of_fusions():
    assert sum(operations(product.lower(X).compile()).values()) == 1
    found = operations(gzip.open(ROOT / "tests" / "support" / "programs" / "v5e-data.txt.gz", "rt").read())
    assert found["fusion"] > 10 and "parameter" not in found


def test_rematerialised_operations_are_told_by_their_names():
    text = product.lower(X).compile().as_text()
    name = module.parse(text).computations[module.parse(text).entry].root
    assert rematerialised(text) == 0
    assert rematerialised(text.replace(f"%{name} ", "%fusion.3.remat2 ")) == 1


def test_without_libtpu_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(topologies, "installed", lambda: False)
    with pytest.raises(RuntimeError, match="needs libtpu.*`make aot`"):
        topologies.topology.__wrapped__("v2-8")


def test_what_cpp_writes_to_stderr_is_not_seen(capfd):
    with topologies.quiet():
        os.write(2, b"chatter")
    os.write(2, b"after")
    assert capfd.readouterr().err == "after"


@compiler
@pytest.mark.parametrize("name", REPEATED)
def test_a_recorded_cell_compiles_to_the_same_again(name):
    from benchmarks import aot

    (one,) = (each for each in aot.cells() if each.name == name)
    found, record = compile_for(one.tpu, *aot.program(one)), RECORD[name]
    assert (found.fits, found.traffic) == (record.fits, record.traffic)
    assert found.peak == pytest.approx(record.peak, rel=0.05)
    assert found.flops == (record.flops and pytest.approx(record.flops, rel=0.05))


@compiler
@pytest.mark.parametrize("name, devices", [
    ("v2-8", 8), ("v3-8", 8), ("v4:2x2x2", 8), ("v4:2x4x4", 32), ("v5e-1", 1), ("v5e-8", 8),
    ("v5p", 8), ("v6e-8", 8), ("v5e:2x2", 4)])
def test_topologies_have_as_many_devices_as_their_names_say(name, devices):
    assert len(topologies.topology(name)) == devices


@compiler
@pytest.mark.parametrize("name", ["v5e-7", "v2:2x3x5", "h100"])
def test_a_topology_that_does_not_exist_is_refused(name):
    with pytest.raises(ValueError, match=f"no topology '{name}'; expected one of v2-8, v3-8"):
        topologies.topology(name)


@compiler
def test_a_mesh_of_more_or_other_devices_is_refused():
    with pytest.raises(ValueError, match="needs 16 devices; v2-8 has 8"):
        tpu_mesh("v2-8", (8, 2))
    for mesh in (make_mesh((8, 1)), tpu_mesh("v5e-8", (8, 1))):
        x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, P("batch")))
        with pytest.raises(ValueError, match="expected arguments on one mesh of v2-8"):
            compile_for("v2-8", product, x)


@compiler
def test_what_was_compiled_is_not_compiled_again(tmp_path, monkeypatch):
    first = compile_for("v2-8", product, X, cache=tmp_path)
    assert first.fits and first.flops == 2 * 256**3 and first.arguments == first.outputs == 2**18
    monkeypatch.setattr(topologies, "_compile", None)
    assert compile_for("v2-8", product, X, cache=tmp_path) == first
    assert len(list(tmp_path.iterdir())) == 1
    for other in ("v5e-1", jax.ShapeDtypeStruct((128, 128), jnp.float32)):
        topology, x = (other, X) if isinstance(other, str) else ("v2-8", other)
        with pytest.raises(TypeError):  # it wants to compile
            compile_for(topology, product, x, cache=tmp_path)


@compiler
def test_what_is_looked_for_is_found_and_kept(tmp_path):
    mesh = tpu_mesh("v5e-8", (8, 1))
    spec = partial(NamedSharding, mesh)
    x = jax.ShapeDtypeStruct((1024, 256), jnp.float32, sharding=spec(P("batch")))
    w = jax.ShapeDtypeStruct((256, 512), jnp.float32, sharding=spec(P("batch")))

    @partial(jax.jit, out_shardings=spec(P("batch")))
    def gradient(w, x):
        with jax.named_scope("mlp"):
            return jax.grad(lambda w: jnp.square(x @ jax.reshard(w, P())).sum())(w)

    seen = partial(look, "v5e-8", {"w_DF": ((256, 512), (32, 512))})
    plain = compile_for("v5e-8", gradient, w, x, cache=tmp_path)
    found = compile_for("v5e-8", gradient, w, x, cache=tmp_path, look=seen)
    assert plain.seen is None and dataclasses.replace(found, seen=None, seconds=0) == (
        dataclasses.replace(plain, seconds=0))
    assert found.seen["gradients"]["w_DF"] in (SCATTERED, WHOLE)
    assert found.seen["parts"]["mlp"] > 0
    assert compile_for("v5e-8", gradient, w, x, cache=tmp_path, look=None) == found


@compiler
def test_a_program_that_does_not_fit_is_reported_with_both_numbers():
    found = compile_for("v2-8", product, BIG)
    assert not found.fits and found.peak > found.available > 7 * 2**30
    assert found.flops is found.traffic is None


@compiler
def test_processes_compile_side_by_side_and_say_nothing(tmp_path):
    code = ("import jax; jax.config.update('jax_platforms', 'cpu'); "
            "from tests.planning.test_topologies import *; "
            f"print(compile_for('v2-8', product, X, cache={str(tmp_path)!r}).flops)")
    both = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    for child in both:
        out, err = child.communicate()
        assert (child.returncode, out, err) == (0, f"{2 * 256**3}\n", "")
    assert len(list(tmp_path.iterdir())) == 1


@compiler
def test_a_product_that_ends_in_float32_is_written_sooner_than_one_in_bfloat16():
    """Why the odds of `meshbook.models.fused_loss` are float32 whatever the model is."""
    def raw(dtype):
        @jax.jit
        def odds(h, w):
            product = jnp.einsum("nD,Dv->nv", h, w, preferred_element_type=jnp.float32)
            return jnp.exp(product).astype(dtype)

        arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16)
                     for shape in ((128, 256), (256, 50_304))]
        text = topologies.text_for("v5e-1", odds, *arguments)
        return estimated_run(text, None, DEVICES["TPU v5e"]).raw

    assert raw(jnp.bfloat16) > 1.3 * raw(jnp.float32)
