"""What layers keep for the backward pass, by the table, is what a scan over layers stacks."""
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshbook.costs.memory import kept_bytes
from meshbook.costs.plans import Plan
from meshbook.costs.rows import chosen
from meshbook.costs.step import describe
from meshbook.costs.tables import table_of
from meshbook.models.decoder import DecoderConfig
from meshbook.models.expert_layers import ExpertSizes
from meshbook.planning.plan_programs import plan_program
from meshbook.sharding import make_mesh
from meshbook.training import value_and_gradients

ROWS = 3
PLAIN = DecoderConfig(vocabulary=500, tokens=16, embed=32, hidden=64, heads=8, layers=2)
GROUPS = replace(PLAIN, groups=4, bias=True, gated=False, dtype=jnp.bfloat16, dropout=0.1)
LATENT = replace(PLAIN, latent=8, rotary=6, layers=4, period=2, bias=True)


def scans(jaxpr):
    """The scans of a program that stand in no other."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn
            continue
        for inner in jax.tree.leaves(list(eqn.params.values()),
                                     is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from scans(inner)


def stack(config, plan):
    """(mesh, what the forward scan over the layers stacks), of ROWS rows."""
    mesh = make_mesh(tuple(plan.mesh.values()), tuple(plan.mesh))
    _, state, batch, key = plan_program(config, plan, ROWS, mesh, optax.sgd(0.1))
    with jax.set_mesh(mesh):
        program = jax.make_jaxpr(value_and_gradients)(state, batch, key)
    (scan,) = [eqn for eqn in scans(program.jaxpr) if not eqn.params["reverse"]
               and eqn.params["length"] == config.layers // config.period
               and eqn.params["num_carry"] == 1]
    return mesh, [x.aval for x in scan.outvars[1:]]


def bytes_of(arrays):
    """Bytes of these arrays on one device."""
    return sum(np.prod(each.sharding.shard_shape(each.shape)) * each.dtype.itemsize
               for each in arrays)


def stacked(config, plan):
    """Bytes that the forward scan over the layers stacks on each device, of ROWS rows each."""
    mesh, arrays = stack(config, plan)
    return bytes_of(each for each in arrays if each.ndim > 2  # no weight, no key
                    and each.shape[1] in (ROWS, ROWS * mesh.size))


@pytest.mark.parametrize("remat", ["none", "products", "attention", "all"])
@pytest.mark.parametrize("config, rules", [
    (PLAIN, "tensor_parallel"), (PLAIN, "sequence_parallel"), (GROUPS, "tensor_parallel"),
    (LATENT, "tensor_parallel"), (LATENT, "sequence_parallel")])
def test_what_is_kept_is_what_the_scan_stacks(config, rules, remat):
    plan = Plan(model=2, rules=rules, remat=remat)
    assert stacked(config, plan) == kept_bytes(describe(config, plan, ROWS), remat, tiles=False)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("capacity", [1.0, 1.5])
def test_slots_that_experts_keep_are_those_that_the_scan_stacks(gated, capacity):
    config = replace(PLAIN, gated=gated, experts=ExpertSizes(4, 2, capacity=capacity))
    plan, slots = Plan(model=2, rules="tensor_parallel", remat="none"), 4 * ROWS * int(8 * capacity)
    mesh, arrays = stack(config, plan)
    found = [each for each in arrays if each.shape[1:2] == (mesh.size,)  # a device each
             and np.prod(each.shape[2:]) in (slots * 32, (1 + gated) * slots * 64 // 2)]
    step = describe(config, plan, ROWS)
    (flags,) = {each.flags for each in step.placed if each.flags}
    assert bytes_of(found) == sum(
        config.layers * each.count * 4 * step.numbers_of(each.letters)
        for each in chosen(table_of(config).kept["none"], flags) if "Z" in each.letters) > 0


@pytest.mark.parametrize("config, ways", [(PLAIN, 1), (LATENT, 2)])
def test_attention_row_by_row_keeps_no_scores(config, ways):
    config, plan = replace(config, by_row=True), Plan(model=ways, rules="tensor_parallel")
    assert stacked(config, plan) == kept_bytes(describe(config, plan, ROWS), "none", tiles=False)
