"""Where groups of devices lie on a machine, and how long its links need, worked out by hand."""
import itertools
import math
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from meshbook.costs.devices import DEVICES
from meshbook.costs.machines import SLICES, Group, Machine, along_all, link_seconds
from meshbook.costs.places import spans
from meshbook.costs.plans import Plan
from meshbook.costs.seconds import bounds, likely_seconds, step_seconds
from meshbook.costs.step import describe
from meshbook.costs.work import causal_work, least_work, step_work
from meshbook.hlo.wire import wire_seconds
from meshbook.models import ViTConfig
from meshbook.models.decoder import DecoderConfig

H100, A100, V4, V5E, V5P = (DEVICES[name] for name in (
    "H100", "A100", "TPU v4", "TPU v5e", "TPU v5p"))
N = 8 * 2**30  # bytes of a result
LLAMA = DecoderConfig(128_256, tokens=8192, embed=4096, hidden=14_336, heads=32, groups=8,
                      layers=32, dtype=jnp.bfloat16)


@pytest.mark.parametrize("mesh", [
    {"batch": 4, "model": 4}, {"batch": 2, "stage": 2, "model": 8}, {"batch": 16, "model": 1},
    {"batch": 1, "model": 16}, {"batch": 8, "model": 3}, {"batch": 3, "stage": 4, "model": 2}])
def test_gpus_of_a_node_are_neighbours(mesh):
    size = math.prod(mesh.values())
    groups = Machine(H100, (math.ceil(size / 8) * 8,)).groups(mesh)
    ids = np.arange(size).reshape(*mesh.values())
    for at, axis in enumerate(mesh):
        lines = np.moveaxis(ids, at, -1).reshape(-1, mesh[axis])
        nodes = max(len({each // 8 for each in line}) for line in lines.tolist())
        found = groups[axis]
        assert found.near == mesh[axis] // nodes and found.sizes == (found.near,)
        assert found.near * found.apart >= mesh[axis] and found.shared == 1
        if mesh[axis] % nodes == 0:
            assert found.apart == nodes


def test_a_collective_over_nodes_waits_for_the_slower_of_two_networks():
    group = Machine(H100, (32,)).groups({"batch": 32})["batch"]
    assert (group.near, group.apart) == (8, 4)
    nvlink, infiniband = 450e9, 50e9
    by_hand = {  # the longer of: in a node, between nodes
        "all-reduce": (N / nvlink, 2 * 3 / 4 * N / 8 / infiniband),  # its switch adds up
        "all-gather": (7 / 8 * N / nvlink, 3 / 4 * N / 8 / infiniband),
        "reduce-scatter": (7 * 4 * N / nvlink, 3 * N / infiniband),
        "all-to-all": (7 / 8 * N / 4 / nvlink, 3 / 4 * N / infiniband),
        "collective-permute": (N / nvlink, N / infiniband)}
    for kind, each in by_hand.items():
        assert link_seconds(kind, group, N, H100) == pytest.approx(max(each))
    no_switch = link_seconds("all-reduce", group._replace(apart=1), N, A100)
    assert no_switch == pytest.approx(2 * 7 / 8 * N / 300e9)  # adds nothing up
    assert link_seconds("all-reduce", Group((1,), (False,), 1, 1, 4), N, H100) == pytest.approx(
        2 * 3 / 4 * N / infiniband)


def test_rings_are_where_a_slice_has_them():
    rings = lambda device, *shape: Machine(device, shape).rings
    assert rings(V5E, 16, 16) == (True, True, False)
    assert rings(V5E, 8, 16) == (False, True, False) and rings(V5E, 8, 8) == (False,) * 3
    assert rings(V4, 4, 4, 8) == (True,) * 3 and rings(V4, 2, 4, 4) == (False,) * 3
    assert rings(DEVICES["TPU v2"], 4, 4) == (False,) * 3  # not known
    whole, part = (Machine(V5E, (16, 16)).groups({"batch": 256 // ways, "model": ways})["model"]
                   for ways in (16, 4))
    assert whole == ((16,), (True,), 1, 16, 1) and part == ((4,), (False,), 1, 4, 1)
    line, ring = (wire_seconds("all-gather", [16, 4], (0, N), V5E, each)
                  for each in ((False, False), (True, False)))
    assert line == pytest.approx(N * 63 / 64 / 100e9) and ring == pytest.approx(line * 2 / 3)


def test_slices_are_split_by_the_first_axis_that_they_divide():
    groups = Machine(V5E, (4, 4), 2).groups({"batch": 8, "model": 4})
    assert groups["batch"] == ((4,), (False,), 1, 4, 2) and groups["model"].apart == 1
    groups = Machine(V5E, (4, 4), 2).groups({"batch": 1, "stage": 2, "model": 16})
    assert [groups[axis].apart for axis in groups] == [1, 2, 1] and groups["stage"].near == 1
    both = along_all([groups["stage"], groups["model"]])
    assert (both.near, both.apart, both.sizes) == (16, 2, (4, 4))
    assert link_seconds("all-reduce", both, N, V5E) == pytest.approx(
        max(2 * 15 / 16 * N / 100e9, 2 / 2 * N / 16 / 3.125e9))


@pytest.mark.parametrize("name", SLICES)
def test_slices_that_there_are_can_be_laid_out(name):
    device = DEVICES[name]
    for shape in SLICES[name]:
        size = math.prod(shape)
        assert Machine(device, shape).size == size
        assert len(shape) == device.links // 2 and list(shape) in (sorted(shape), [2, 2, 1])
        assert max(shape) <= 2 * min(shape)  # as near to a square or a cube as possible
    sizes = [math.prod(shape) for shape in SLICES[name]]  # there is no slice of two
    most = 256 if len(shape) == 2 else 4096
    assert sizes == [1, *(2**n for n in range(2, 13) if 2**n <= most)] + {
        "TPU v5p": [6144]}.get(name, [])
    small = [shape for shape in SLICES[name] if math.prod(shape) <= 64]
    for shape, ways in itertools.product(small, (1, 2, 4)):
        mesh = {"batch": math.prod(shape) // ways, "model": ways}
        if math.prod(shape) % ways == 0:
            found = Machine(device, shape).groups(mesh)
            assert {axis: each.near for axis, each in found.items()} == mesh
            assert math.prod(spans(shape, mesh)["batch"].sizes) == mesh["batch"]


@pytest.mark.parametrize("make, words", [
    (lambda: Machine(H100, (12,)), "expected whole nodes of 8 H100; found 12"),
    (lambda: Machine(H100, (2, 4)), r"expected a number of H100.*found \(2, 4\) and 1 slices"),
    (lambda: Machine(V4, (0, 4)), r"one device or more in each dimension.*found \(0, 4\) and 1"),
    (lambda: Machine(V4, (4, 4, 4), 2), "the network between slices of TPU v4 is not known"),
    (lambda: Machine(V5E, (3,), 2).groups({"batch": 3}), "over 2 slices: batch=3"),
    (lambda: spans((2, 2, 2, 2), {"batch": 16}), "one to three dimensions; found")])
def test_machines_that_there_are_not_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_kernel_that_skips_what_is_masked_does_no_more_than_must_be_done():
    plan = Plan(8, rules="data_parallel")
    done = {kind: step_work(describe(LLAMA, replace(plan, attention=kind), 8)).done
            for kind in ("rows", "fused", "skipped")}
    step = describe(LLAMA, replace(plan, attention="skipped"), 8)
    assert done["rows"] == done["fused"]
    product = 2 * LLAMA.tokens**2 * LLAMA.embed * LLAMA.layers  # scores, or values, of one row
    hidden = 1 - (LLAMA.tokens + 1) / (2 * LLAMA.tokens)
    forward, scores_again, backward = 2, 1, 4
    assert done["fused"] - done["skipped"] == pytest.approx(
        hidden * product * (forward + scores_again + backward))
    assert least_work(step) == done["skipped"] >= causal_work(step)
    image = describe(ViTConfig(), plan, 8)
    assert least_work(image) == step_work(image).done  # an image has no mask


def test_no_plan_of_attention_beats_its_bounds():
    machine, config = Machine(V5P, (2, 2, 2)), replace(LLAMA, tokens=131_072, layers=4)
    groups = machine.groups(Plan(context=8).sizes)
    for kind in ("blocks", "fused", "skipped"):
        step = describe(config, Plan(context=8, rules="zero1", attention=kind), 1)
        least, spent = bounds(step, V5P, groups), step_seconds(step, V5P, groups)
        assert least["compute"] <= spent["products"] and least["memory"] <= spent["memory"]
        assert least["links"] <= sum(t for what, t in spent.items() if what in groups)
    skipped = bounds(step, V5P, groups)["compute"]
    whole = step_work(describe(config, Plan(context=8, rules="zero1"), 1)).done / V5P.flops
    assert 1.5 < whole / skipped < 2  # what a floor that counts all pairs calls impossible


def test_a_range_of_times_is_never_below_a_bound():
    plan = Plan(8, attention="skipped")
    for machine in (Machine(H100, (8,)), Machine(V5P, (2, 2, 2))):
        groups, step = machine.groups(plan.sizes), describe(LLAMA, plan, 16)
        low, high = likely_seconds(step, machine.device, groups)
        assert max(bounds(step, machine.device, groups).values()) <= low < high
