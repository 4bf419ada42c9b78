"""Parameters, work and bytes by the table are those of compiled programs.

Memory is that of programs for TPUs (test_step_memory.py). What the CPU's compiler holds is another
matter: with a policy of rematerialisation it keeps up to twice as much.
"""
import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from planned_steps import compiled, numbers_held, temporaries_of

from meshbook import proofs
from meshbook.costs.memory import step_memory
from meshbook.costs.plans import PRESETS, Plan
from meshbook.costs.ranking import impossible
from meshbook.costs.step import describe
from meshbook.costs.traffic import step_traffic
from meshbook.costs.turns import SCHEDULES, turns_of
from meshbook.costs.work import step_work
from meshbook.drawing.schedules import facts
from meshbook.hlo.flops import work
from meshbook.models.decoder import Decoder, DecoderConfig
from meshbook.models.decoder_config import POLICIES
from meshbook.models.expert_layers import ExpertSizes
from meshbook.models.losses import language_loss
from meshbook.parallel import overlap, pipeline, schedules, sequence
from meshbook.planning.plan_programs import TABLES
from meshbook.sharding import Sharding, make_mesh
from meshbook.training import abstract_state, compile_step

SMALL = DecoderConfig(vocabulary=500, tokens=16, embed=32, hidden=64, heads=8, layers=2)
GROUPS = replace(SMALL, groups=4, bias=True, gated=False)
LATENT = replace(SMALL, latent=8, rotary=6, layers=4, period=2, bias=True)
NO_BIASES = replace(SMALL, latent=8, rotary=10, gated=False)
NO_ROTARY = replace(SMALL, latent=16)
LONG = replace(SMALL, tokens=64, layers=8)
STAGED = replace(SMALL, tokens=32, layers=4)
SPLIT = DecoderConfig(500, tokens=256, embed=64, hidden=128, heads=8, layers=2)
ROUTED = DecoderConfig(500, tokens=64, embed=64, hidden=128, heads=8, layers=4, period=2,
                       experts=ExpertSizes(8, 2, capacity=1.25))
SHARED = replace(ROUTED, experts=ExpertSizes(8, 2, shared=64, capacity=1.5, auxiliary=0.01))
OF_ALL = replace(LATENT, rotary=4, gated=False, by_row=True, experts=ExpertSizes(
    8, 3, shared=16, capacity=1.5, router="sigmoid", auxiliary=1e-4))
ONE_ACTIVE = replace(OF_ALL, experts=replace(OF_ALL.experts, active=1))
DATA, TENSOR, FSDP = "data_parallel", "tensor_parallel", "fully_sharded"
EXACT = [  # config, plan, rows, whether gradients are clipped
    (replace(SMALL, dropout=0.1), Plan(8, rules=DATA, remat="products"), 8, False),
    (SMALL, Plan(4, model=2, rules=TENSOR), 8, True),
    (SMALL, Plan(8, rules=FSDP, remat="attention"), 8, True),
    (GROUPS, Plan(2, model=4, rules=TENSOR, remat="all"), 8, False),
    (replace(GROUPS, tokens=600), Plan(4, model=2, rules=FSDP), 8, False),
    (LATENT, Plan(4, model=2, rules=TENSOR, remat="attention"), 8, False),
    (LATENT, Plan(4, model=2, rules=FSDP, remat="products"), 8, True),
    (replace(NO_BIASES, dtype="bfloat16"), Plan(model=8, rules=TENSOR), 8, False),
    (NO_BIASES, Plan(2, model=4, rules=FSDP, remat="all"), 2, False),
    (NO_ROTARY, Plan(4, rules=DATA), 12, False),
    (SMALL, Plan(8, rules=FSDP, microbatches=2), 16, False),
    (replace(LATENT, dtype="bfloat16"), Plan(
        4, model=2, rules=FSDP, microbatches=3, remat="all"), 24, True),
    (SMALL, Plan(8, rules="zero1"), 8, False),
    (GROUPS, Plan(4, model=2, rules="zero1"), 8, True),
    (GROUPS, Plan(4, model=2, rules="zero2", remat="all"), 8, False),
    (LATENT, Plan(4, model=2), 8, False),
    (SMALL, Plan(2, model=4, rules="fully_sharded_again"), 8, False),
    (GROUPS, Plan(4, model=2, rules="fully_sharded_again", remat="products"), 8, True),
    (GROUPS, Plan(2, model=4, rules="sequence_parallel", remat="products"), 8, True),
    (SMALL, Plan(model=4, rules="sequence_parallel"), 8, False),
    (LATENT, Plan(4, model=2, rules="sequence_parallel", remat="attention"), 8, False),
    (NO_BIASES, Plan(model=8, rules="sequence_parallel", remat="all"), 8, False),
    (ONE_ACTIVE, Plan(2, expert=2, model=2, rules="zero1", microbatches=3), 24, False),
    (OF_ALL, Plan(4, expert=2, microbatches=5, remat="products"), 40, False),
    (LATENT, Plan(4, model=2, rules="zero1", microbatches=3, remat="all"), 24, False),
    (STAGED, Plan(2, stage=2, model=2, rules=FSDP, microbatches=4, remat="all"), 16, False),
    (LATENT, Plan(8, rules="fully_sharded_again"), 16, False),
    (OF_ALL, Plan(4, model=2, rules=TENSOR, remat="products"), 16, False),
    (OF_ALL, Plan(4, expert=2, microbatches=2, remat="attention"), 16, False),
    (OF_ALL, Plan(2, expert=2, model=2, rules=TENSOR), 16, False),
    (OF_ALL, Plan(2, expert=2, stage=2, rules=FSDP, microbatches=2, remat="all"), 16, False)]
OF_ADAM = [  # config, plan, rows
    (LONG, Plan(), 8), (replace(SMALL, vocabulary=4000), Plan(remat="products"), 8),
    (replace(LONG, groups=4, bias=True, gated=False), Plan(
        4, model=2, rules=TENSOR, remat="products"), 32),
    (replace(LATENT, tokens=64), Plan(4, model=2, rules=FSDP, remat="attention"), 32),
    (LONG, Plan(8, rules=FSDP, remat="all"), 64), (LONG, Plan(8, rules="zero1", remat="all"), 64),
    (LONG, Plan(4, model=2, rules="zero2"), 32),
    (replace(SMALL, embed=128, hidden=256), Plan(4, model=2, rules="fully_sharded_again"), 32),
    (LONG, Plan(8, remat="all"), 64),
    (replace(LONG, groups=4), Plan(2, model=4, rules="sequence_parallel"), 16),
    (replace(SPLIT, groups=4, tokens=4096), Plan(2, context=4, rules=DATA, remat="attention"), 4),
    (replace(SPLIT, bias=True, tokens=4096), Plan(context=4, rules=DATA, remat="all"), 4),
    (replace(SPLIT, groups=4, gated=False), Plan(
        2, context=4, rules=DATA, remat="products", method="gather"), 4),
    (SPLIT, Plan(4, context=2, rules=DATA, method="ulysses"), 4),
    (SHARED, Plan(2, expert=4, rules=DATA), 16),
    (replace(ROUTED, bias=True, gated=False), Plan(expert=4, rules=DATA, remat="products"), 16)]
named = lambda given: given.name if isinstance(given, Plan) else None


@pytest.mark.parametrize("config, plan, rows, clip", EXACT, ids=named)
def test_parameters_work_and_bytes_are_those_of_the_program(config, plan, rows, clip):
    step, mesh, state, program = compiled(config, plan, rows, clip)
    assert impossible(config, plan, rows) == ""
    assert numbers_held(state.params) == step.numbers["stored"]
    assert work(program) == pytest.approx(step_work(step).done, rel=1e-9)
    proofs.assert_communicates(program, mesh, step_traffic(step, clipped=clip))
    planted = replace(plan, remat="all" if step.remat == "none" else "none")
    assert work(program) != pytest.approx(
        step_work(describe(config, planted, rows)).done, rel=1e-6)
    if plan.batch % 2 == 0 and plan.rules != DATA:  # a formula for another mesh
        other = describe(config, replace(plan, batch=plan.batch // 2, model=plan.model * 2), rows)
        with pytest.raises(AssertionError):
            proofs.assert_communicates(program, mesh, step_traffic(other, clipped=clip))


@pytest.mark.parametrize("config, plan, rows", OF_ADAM, ids=named)
def test_arguments_are_those_of_the_program_and_so_are_temporaries_where_layers_keep_all(
        config, plan, rows):
    step, mesh, state, program = compiled(config, plan, rows, optimizer=optax.adam(1e-3))
    held, found = step_memory(step, tiles=False), program.memory_analysis()
    assert 4 * numbers_held(state.params) == held.parameters
    assert 4 * (numbers_held(state.opt_state) - 1) == held.moments  # Adam counts its steps
    share = temporaries_of(step) / found.temp_size_in_bytes
    keeps_all = not plan.remat and plan.context * plan.expert == 1
    assert (0.9 if keeps_all else 0.35) < share < 1.15
    arguments = held.parameters + held.moments + held.inputs
    assert found.argument_size_in_bytes == pytest.approx(arguments, abs=64)  # counters, and a key
    proofs.assert_communicates(program, mesh, step_traffic(step))


@pytest.mark.parametrize("config, plan", [
    (replace(STAGED, bias=True), Plan(2, stage=4, microbatches=4)),
    (replace(STAGED, groups=4), Plan(4, stage=2, schedule="lockstep", microbatches=2)),
    (STAGED, Plan(stage=4, schedule="one_f_one_b", microbatches=6)),
    (replace(STAGED, layers=8, gated=False), Plan(
        2, stage=4, schedule="zero_bubble", microbatches=6))], ids=named)
def test_stages_send_what_the_program_sends(config, plan):
    plan = replace(plan, rules=DATA)
    step, mesh, state, program = compiled(config, plan, plan.microbatches * plan.batch)
    assert numbers_held(state.params) == step.numbers["stored"]
    expected, turns = step_traffic(step), turns_of(plan.schedule, plan.stage, plan.microbatches)
    if plan.schedule != "gpipe":  # a branch that is not taken in every turn is read as if it were
        axes = "all-reduce", ("stage",)
        more = (turns.permutes // 2 - plan.microbatches) * config.tokens * (
            4 * 4 * config.embed + 3 * 4)
        expected[axes] = expected[axes]._replace(bytes=expected[axes].bytes + more)
    proofs.assert_communicates(program, mesh, expected)
    found = proofs.collectives(program, mesh)
    assert found["collective-permute", ("stage",)].count == turns.permutes


@pytest.mark.parametrize("p", range(1, 7))
@pytest.mark.parametrize("m", (1, 2, 5, 8, 16))
def test_slots_bubble_and_kept_are_those_of_the_simulated_schedule(p, m):
    for name, make in TABLES.items():
        found = schedules.simulate(make(p, m))
        turns = turns_of(name, p, m)
        assert turns.permutes == 2 * found.makespan
        assert turns.bubble == pytest.approx(found.bubble)
        assert turns.kept == max(found.live) and turns.factor == 1
    gpipe = schedules.simulate(schedules.gpipe(p, m))
    assert turns_of("gpipe", p, m).bubble == pytest.approx(gpipe.bubble)
    assert turns_of("gpipe", p, m).factor == pytest.approx((m + p - 1) / m)
    lockstep = facts(pipeline.lockstep_events(p, m))
    assert turns_of("lockstep", p, m).bubble == pytest.approx(lockstep.bubble)


def test_memory_falls_with_the_stages_and_grows_with_what_is_kept():
    held = {name: step_memory(describe(STAGED, Plan(
        stage=4, rules=DATA, schedule=name, microbatches=16), 16)) for name in SCHEDULES}
    activations = [held[name].activations for name in SCHEDULES]
    assert activations[0] / activations[2] == pytest.approx(19 / 4) and (
        activations[2] == activations[3] and activations[1] < activations[2])
    one, four = (describe(STAGED, Plan(stage=p), 16).numbers["stored"] for p in (1, 4))
    assert one / 4 < four < one / 4 + STAGED.embed


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("ways, rings", [
    (2, "one way"), (3, "none"), (3, "one way"), (3, "both ways"), (4, "both ways"),
    (5, "one way"), (5, "both ways")])
def test_whatever_is_kept_rings_do_no_more_work_and_send_no_more(policy, ways, rings, monkeypatch):
    for function in (overlap.all_gather_matmul, overlap.matmul_reduce_scatter):
        monkeypatch.setattr(sequence, function.__name__, partial(
            function, bidirectional=rings == "both ways"))
    config = DecoderConfig(128 * ways, tokens=4 * ways, embed=16 * ways, hidden=32 * ways,
                           heads=2 * ways, layers=2, remat=policy)
    mesh, rules = make_mesh((1 if ways == 5 else 2, ways)), Sharding.sequence_parallel(
        overlapped=rings != "none")
    state = abstract_state(lambda: Decoder(config, rules, rngs=nnx.Rngs(0)), optax.sgd(0.1), mesh,
                           loss=language_loss)
    ids = jax.ShapeDtypeStruct((2, config.tokens), jnp.int32,
                               sharding=jax.NamedSharding(mesh, jax.P("batch")))
    program = compile_step(state, {"inputs": ids, "labels": ids},
                           jax.eval_shape(lambda: jax.random.key(0)))
    step = describe(config, Plan(**mesh.shape, rules="sequence_parallel"), 2)
    assert work(program) == pytest.approx(step_work(step).done, rel=1e-9)
    found = proofs.collectives(program, mesh)
    assert found.wire("model") == pytest.approx(step_traffic(step).wire("model"), rel=1e-9)
    assert (("collective-permute", ("model",)) in found) == (rings != "none")


def test_under_tensor_parallelism_latents_are_made_by_every_device():
    whole, each = (step_work(describe(LATENT, Plan(model=ways, rules=TENSOR), 8))
                   for ways in (1, 4))
    assert whole.useful == 4 * each.useful
    D, R, P, layers, turned = 32, 8, 6, 4, 2  # two of four layers have no positions
    again = 3 * 3 * 8 * 16 * (layers * 2 * D * 2 * R + turned * 2 * 2 * R * P)
    assert 4 * each.done - whole.done == pytest.approx(again)
    one, four = (step_work(describe(SMALL, Plan(model=ways, rules=TENSOR), 8)) for ways in (1, 4))
    assert one.factor == four.factor
    repeated = step_work(describe(SMALL, Plan(model=4, rules=DATA), 8))
    assert repeated.factor == pytest.approx(4 * one.factor)


def test_a_stricter_policy_does_more_work():
    factors = [step_work(describe(LATENT, Plan(remat=policy), 8)).factor
               for policy in ("none", "products", "attention", "all")]
    assert set(POLICIES) == {"none", "products", "attention", "all"}
    assert factors == sorted(factors) and 1 < factors[0] < factors[1]
    assert factors[-1] < 4 / 3 * factors[0]


@pytest.mark.parametrize("config", [SMALL, GROUPS, LATENT, NO_BIASES, NO_ROTARY])
def test_in_bfloat16_half_travels_but_for_norms_and_the_loss(config):
    config = replace(config, remat="all")
    step = describe(config, Plan(4, model=2, rules=FSDP), 8)
    whole, half = (step_traffic(step, number) for number in (4, 2))
    norms = 4 * (2 * config.layers + 1) * (1 + config.bias) * config.embed
    again = norms + 4 * 2 * config.layers * (1 + config.bias) * config.embed
    rest = {("all-reduce", ("batch",)): norms + 8, ("all-gather", ("batch",)): again,
            ("all-reduce", ("model",)): 3 * 4 * 2 * 16}
    for key in whole:
        assert half[key].bytes - rest[key] == (whole[key].bytes - rest[key]) / 2, key


def test_jaxformer_without_its_experts():
    config = DecoderConfig.jaxformer()
    step = describe(config, Plan(), 1)
    turned = {layers: sum(each.stored for each in step.placed if each.flags == flags) / layers
              for flags, layers in {each.flags: each.layers for each in step.placed
                                    if each.in_layers}.items()}
    with_positions, without = (turned[layers] for layers in sorted(turned, reverse=True))
    assert with_positions - without == 2 * 128 * 128 + 128 + 2 * 128 * 12 * 128 + 12 * 128
    D, F, E = config.embed, config.hidden, 16
    padding = (config.padded - config.vocabulary) * D
    mlp = 2 * D * F + F + D
    experts = E * mlp + D * E + E + D * 2 * D + 2 * D  # with a router, and two shared experts
    assert step.numbers["stored"] - padding + 8 * (experts - mlp) == 949_248_384


@pytest.mark.parametrize("preset", PRESETS)
def test_of_experts_slots_are_kept_and_sent(preset):
    if preset == "sequence_parallel":
        return
    one, eight = (describe(ROUTED, Plan(8 // ways, expert=ways, rules=preset), 16)
                  for ways in (1, 8))
    assert ("all-to-all", ("expert",)) not in step_traffic(one)
    roomy = replace(ROUTED, experts=ExpertSizes(8, 2, capacity=2.5))
    more = step_traffic(describe(roomy, Plan(expert=8, rules=preset), 16))
    assert more.wire("expert", kind="all-to-all") == 2 * step_traffic(eight).wire(
        "expert", kind="all-to-all")
    assert math.isclose(step_work(one).useful, step_work(eight).useful)
