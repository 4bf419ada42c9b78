"""What layers keep for the backward pass, by the table, is what a scan over layers stacks."""
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshbook.costs.memory import kept_bytes
from meshbook.costs.plans import Plan
from meshbook.costs.step import describe
from meshbook.models.decoder import DecoderConfig
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


def stacked(config, plan):
    """Bytes that the forward scan over the layers stacks on each device, of ROWS rows each."""
    mesh = make_mesh(tuple(plan.mesh.values()), tuple(plan.mesh))
    _, state, batch, key = plan_program(config, plan, ROWS, mesh, optax.sgd(0.1))
    with jax.set_mesh(mesh):
        program = jax.make_jaxpr(value_and_gradients)(state, batch, key)
    (scan,) = [eqn for eqn in scans(program.jaxpr) if not eqn.params["reverse"]
               and eqn.params["length"] == config.layers // config.period
               and eqn.params["num_carry"] == 1]
    total = 0
    for each in (x.aval for x in scan.outvars[1:]):
        if each.ndim > 2 and each.shape[1] in (ROWS, ROWS * mesh.size):  # no weight, no key
            total += np.prod(each.sharding.shard_shape(each.shape)) * each.dtype.itemsize
    return total


@pytest.mark.parametrize("remat", ["none", "products", "attention", "all"])
@pytest.mark.parametrize("config, rules", [
    (PLAIN, "tensor_parallel"), (PLAIN, "sequence_parallel"), (GROUPS, "tensor_parallel"),
    (LATENT, "tensor_parallel"), (LATENT, "sequence_parallel")])
def test_what_is_kept_is_what_the_scan_stacks(config, rules, remat):
    plan = Plan(model=2, rules=rules, remat=remat)
    assert stacked(config, plan) == kept_bytes(describe(config, plan, ROWS), remat, tiles=False)


@pytest.mark.parametrize("config, ways", [(PLAIN, 1), (LATENT, 2)])
def test_attention_row_by_row_keeps_no_scores(config, ways):
    config, plan = replace(config, by_row=True), Plan(model=ways, rules="tensor_parallel")
    assert stacked(config, plan) == kept_bytes(describe(config, plan, ROWS), "none", tiles=False)
