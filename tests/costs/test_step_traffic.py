"""What a step sends, by its table and its rules, is what compiled programs send."""
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

from meshbook import proofs
from meshbook.costs.plans import Plan, rules_of
from meshbook.costs.step import describe
from meshbook.costs.traffic import added, sent, step_traffic
from meshbook.costs.transfers import Sent
from meshbook.costs.work import step_work
from meshbook.hlo import flops
from meshbook.models import MiniGPT, MiniGPTConfig
from meshbook.models.balanced_loss import balanced_loss
from meshbook.models.decoder import Decoder, DecoderConfig
from meshbook.models.expert_layers import ExpertSizes
from meshbook.models.losses import language_loss
from meshbook.sharding import make_mesh
from meshbook.training import abstract_state, as_it_is, train_step

DENSE = DecoderConfig(512, tokens=64, embed=32, hidden=64, heads=8, groups=4, layers=4)
LATENT = replace(DENSE, groups=0, latent=8, rotary=4, period=2, gated=False, bias=True)
EXPERTS = replace(LATENT, experts=ExpertSizes(4, 2, shared=16, capacity=1.5, auxiliary=1e-3))
ALONE = replace(DENSE, experts=ExpertSizes(4, 2, capacity=1.5, auxiliary=1e-3))  # no shared expert
GPT = MiniGPTConfig(512, tokens=32, embed=32, hidden=64, heads=4, layers=2)
CASES = {  # no formula of today's knew the context beside other axes, nor experts without a shared
    "context and model": (DENSE, Plan(2, context=2, model=2, rules="tensor_parallel",
                                      remat="attention", method="gather")),
    "heads for tokens, and model": (DENSE, Plan(2, context=2, model=2, rules="tensor_parallel",
                                                method="ulysses")),
    "ring, and parameters in parts": (DENSE, Plan(2, context=4, rules="fully_sharded_again",
                                                  remat="attention")),
    "ring and ZeRO": (DENSE, Plan(2, context=4, rules="zero1", remat="none")),
    "data parallel on two axes": (LATENT, Plan(2, model=4, rules="data_parallel")),
    "experts, no shared one": (ALONE, Plan(2, expert=2, model=2, rules="tensor_parallel")),
    "experts in parts, two microbatches": (EXPERTS, Plan(
        1, expert=2, model=4, rules="fully_sharded_kept", microbatches=2)),
    "MiniGPT": (GPT, Plan(4, model=2, rules="tensor_parallel"))}


@cache
def compiled(name, rows=16):
    """(a case's program, its mesh, its Step)."""
    from meshbook.parallel.accumulation import in_microbatches

    config, plan = CASES[name]
    mesh, rules = make_mesh(tuple(plan.mesh.values()), tuple(plan.mesh)), rules_of(plan)
    kind, loss = (Decoder, balanced_loss if config.experts else language_loss) if isinstance(
        config, DecoderConfig) else (MiniGPT, language_loss)
    if isinstance(config, DecoderConfig) and plan.remat:
        config = replace(config, remat=plan.remat)
    if plan.microbatches > 1:
        loss = in_microbatches(loss, plan.microbatches)
    across = ("batch", "expert") if plan.expert > 1 else "batch"
    state = abstract_state(lambda: kind(config, rules, rngs=nnx.Rngs(0)), optax.sgd(0.1), mesh,
                           as_it_is, loss, rows=across)
    ids = jax.ShapeDtypeStruct((rows, config.tokens), jnp.int32,
                               sharding=NamedSharding(mesh, P(across)))
    with jax.set_mesh(mesh):
        program = train_step.lower(state, {"inputs": ids, "labels": ids}, jax.eval_shape(
            lambda: jax.random.key(0))).compile()
    return program, mesh, describe(config, plan, rows)


@pytest.mark.parametrize("name", CASES)
def test_bytes_and_work_are_those_of_the_program(name):
    program, mesh, step = compiled(name)
    proofs.assert_communicates(program, mesh, step_traffic(step))
    assert flops.work(program) == step_work(step).done
    other = describe(step.config, replace(step.plan, rules=(
        "data_parallel" if step.plan.rules != "data_parallel" else "tensor_parallel")), step.rows)
    with pytest.raises(AssertionError):
        proofs.assert_communicates(program, mesh, step_traffic(other))


def test_narrow_numbers_travel_as_two_bytes_and_sums_over_microbatches_as_four():
    plan = Plan(4, model=2, rules="tensor_parallel")
    one, two = (describe(DENSE, replace(plan, microbatches=m), 16) for m in (1, 2))
    wide, narrow = (step_traffic(one, number).along("batch").bytes for number in (4, 2))
    assert narrow < 0.6 * wide  # but scales of norms and two numbers of the loss
    assert step_traffic(two, 4).along("batch") == step_traffic(two, 2).along("batch")
    wide, narrow = (step_traffic(two, number).along("model").bytes for number in (4, 2))
    assert narrow < 0.6 * wide


def test_everything_that_is_sent_adds_up_to_the_traffic():
    _, _, step = compiled("context and model")
    events = list(sent(step))
    assert sum(each.bytes for each in events if each.axes) == sum(
        moved.bytes for moved in step_traffic(step).values())
    assert {each.what for each in events} >= {
        "output of token", "output of attention/w_out", "gradient of the input of the MLP",
        "keys and values", "gradients of weights", "loss and accuracy"}


def test_what_is_sent_along_the_same_axes_is_one_line_in_whatever_order_they_are_named():
    step = describe(DecoderConfig(500, tokens=32, embed=48, hidden=64, heads=4, layers=4),
                    Plan(2, context=2, model=2), 8)
    events = [Sent("layers", "backward", "gradients", "all-reduce", axes, 1, size)
              for axes, size in ((("model", "batch"), 8), (("batch", "model"), 2), (("model",), 4),
                                 ((), 3), (("context",), 0))]
    assert added(step, events, lambda each: each.axes) == {
        ("batch", "model"): (2, 10), ("model",): (1, 4)}
