"""A decoder in stages is trained as on one device, in the ticks, bytes and work of its schedule."""
import dataclasses
import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from tiny_pipeline import program_of

from meshbook import proofs
from meshbook.drawing.schedules import facts
from meshbook.models.decoder import Decoder, DecoderConfig
from meshbook.models.losses import language_loss
from meshbook.models.pipelined import pipelined
from meshbook.parallel import schedules
from meshbook.parallel.accumulation import in_microbatches
from meshbook.parallel.pipeline import Pipeline, circular, gpipe, lockstep_events, one_f_one_b
from meshbook.parallel.slots import in_slots, table_of
from meshbook.sharding import Sharding, make_mesh
from meshbook.training import compile_step, create_state, run

SMALL = DecoderConfig(vocabulary=120, tokens=8, embed=16, hidden=32, heads=4, layers=4)
KEY = jax.random.key(0)
AXES = "batch", "stage", "model"
ROW = 8 * 16 * 4  # bytes of one row's activation


def split_1f1b(stages, microbatches):
    return schedules.split_backward(schedules.one_f_one_b(stages, microbatches))


SCHEDULES = {"gpipe": gpipe, "checkpointed": functools.partial(gpipe, recompute=True),
             "lockstep": one_f_one_b, "1F1B": in_slots(split_1f1b),
             "ZB-H1": in_slots(schedules.zero_bubble)}


@dataclasses.dataclass(frozen=True)
class Toy(Pipeline):
    """Layers x + tanh(x w); the loss is the sum of squares, and what is outside is a scale of x."""

    scale: jax.Array
    x_mBD: jax.Array

    def layer(self, w_DD, x_BD, each, shared):
        return x_BD + jnp.tanh(x_BD @ w_DD)

    def own(self, i):
        return None, ()

    def enter(self, i):
        return self.scale * self.x_mBD[i]

    def entered(self, dx_BD, i):
        s, _ = self.place
        return jnp.where(s == 0, (dx_BD * self.x_mBD[i]).sum(), 0)

    def leave(self, y_BD, i):
        s, p = self.place
        return jnp.where(s == p - 1, jnp.square(y_BD).sum(), 0), 2 * y_BD, 0 * y_BD.sum()


@functools.cache
def round_and_round(m, chunks, schedule=circular, rows=("batch",)):
    """The program of a schedule for the toy, on two rows of four stages, right as it is checked."""
    draw = np.random.default_rng(1).normal
    w_LDD, x_mBD = (draw(size=s).astype(np.float32) / 3 for s in ((8, 6, 6), (m, 2, 6)))

    def local(w_vplDD, scale, x_mBD):
        scale = jax.lax.pcast(scale, ("stage", *rows), to="varying")
        toy = Toy("stage", rows, scale, x_mBD)
        w_vlDD = toy.own_part(w_vplDD[:, 0])
        w_vlDD = w_vlDD if schedule is circular else w_vlDD[0]
        total, dw, dscale = schedule(toy, w_vlDD, m)
        dw = dw[:, None] if schedule is circular else dw[None, None]
        return jax.lax.psum(total, ("stage", "batch")), jax.lax.psum(dw, rows), jax.lax.psum(
            dscale, ("stage", "batch"))

    mesh, spec, split = make_mesh((2, 4), ("batch", "stage")), P(None, "stage"), P(None, "batch")
    with jax.set_mesh(mesh):
        given = jax.device_put((w_LDD.reshape(chunks, 4, -1, 6, 6), np.float32(0.7), x_mBD),
                               (spec, P(), split))
        program = jax.jit(jax.shard_map(local, in_specs=(spec, P(), split),
                                        out_specs=(P(), spec, P()))).lower(*given).compile()
        found = jax.device_get(program(*given))

    def loss(w_LDD, scale):
        x = scale * x_mBD
        for w_DD in w_LDD:
            x = x + jnp.tanh(x @ w_DD)
        return jnp.square(x).sum()

    expected, (dw, dscale) = jax.value_and_grad(loss, (0, 1))(w_LDD, np.float32(0.7))
    np.testing.assert_allclose(found[0], expected, rtol=1e-6)
    np.testing.assert_allclose(found[1].reshape(dw.shape), dw, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found[2], dscale, rtol=1e-5)
    return proofs.collectives(program, mesh), proofs.work(program) // (2 * 6 * 6 * m)


@pytest.mark.parametrize("schedule", [gpipe, SCHEDULES["checkpointed"], circular, one_f_one_b])
def test_ticks_for_nothing_leave_no_nan_where_zeros_have_no_gradient(schedule):
    def norm(w, x_BD):  # 0 / 0 for zeros, such as a stage sees before a microbatch has come to it
        return x_BD / jnp.sqrt(jnp.square(x_BD).sum(-1, keepdims=True)) @ w["in"] @ w["out"]

    program_of(schedule, 3, 3, 4, 8, 8, 6, chunks=2 if schedule is circular else 1, each=norm,
               embedded=False)


@pytest.mark.parametrize("p, v, m", [(3, 2, 6), (5, 2, 5), (2, 3, 6), (3, 1, 4)])
def test_a_circular_pipeline_is_right_for_other_stages_chunks_and_microbatches(p, v, m):
    program = program_of(circular, p, m, 4, 8, 16, 2 * p * v, chunks=v)
    useful = 3 * 2 * v * m * 2 * 2 * 4 * 8 * 16  # of a device: two layers in each chunk
    assert proofs.work(program) == Fraction(4, 3) * useful * Fraction(v * m + p - 1, v * m)


def test_a_circular_pipeline_goes_around_in_the_order_of_the_layers():
    for chunks in (1, 2):
        moved, _ = round_and_round(4, chunks)
        ticks = chunks * 4 + 3
        assert moved["collective-permute", ("stage",)] == (2 * ticks, 2 * ticks * 6 * 4)


@pytest.mark.parametrize("schedule, permutes", [
    ("gpipe", 2 * 11), ("checkpointed", 2 * 11), ("lockstep", 2 * 14), ("1F1B", 2 * 30), ("ZB-H1", 2 * 27)])
def test_every_schedule_has_the_gradients_of_one_device_and_sums_them_once(schedule, permutes):
    moved, _ = round_and_round(8, 1, SCHEDULES[schedule])
    assert moved["collective-permute", ("stage",)].count == permutes
    gradients = 2 * 6 * 6 * 4  # of two layers
    assert moved.along("batch").bytes == gradients


def test_weights_that_are_the_same_along_rows_have_their_gradients_summed_in_every_tick():
    moved, _ = round_and_round(8, 1, gpipe, rows=())
    assert moved.along("batch").bytes >= 11 * 2 * 6 * 6 * 4


def batch_of(rows, documents=False):
    ids = np.random.default_rng(0).integers(0, 120, (rows, 9)).astype(np.int32)
    batch = {"inputs": ids[:, :-1], "labels": ids[:, 1:]}
    if documents:
        batch["segments"] = np.repeat([[0, 1]], 4, 1).repeat(rows, 0).astype(np.int32)
        batch["positions"] = np.tile(np.arange(4), 2)[None].repeat(rows, 0).astype(np.int32)
    return batch


def state_of(loss, shape, rules, config):
    return create_state(lambda: Decoder(config, rules, rngs=nnx.Rngs(0)),
                        optax.sgd(0.1, momentum=0.0), make_mesh(shape, AXES), loss=loss)


@functools.cache
def compiled(schedule, shape, m, rows, rules=Sharding.tensor_parallel(), documents=False,
             **changes):
    """(state, program) of a step in stages."""
    config = dataclasses.replace(SMALL, **changes)
    state = state_of(pipelined(SCHEDULES[schedule], m), shape, rules.in_stages(), config)
    return state, compile_step(state, state.program.place(batch_of(rows, documents)), KEY)


@functools.cache
def alone(m, rows, documents=False, **changes):
    """(state, program) of one device that adds up the same microbatches."""
    config = dataclasses.replace(SMALL, **changes)
    state = state_of(in_microbatches(language_loss, m), (1, 1, 1), Sharding.none(), config)
    return state, compile_step(state, state.program.place(batch_of(rows, documents)), KEY)


def same(schedule, shape, m, rows, rules=Sharding.tensor_parallel(), documents=False, **changes):
    ours = compiled(schedule, shape, m, rows, rules, documents, **changes)
    one = alone(m, rows, documents, **changes)
    found = proofs.assert_same_training(run(ours[0], KEY, ours[1]), run(one[0], KEY, one[1]),
                                        [batch_of(rows, documents)])
    assert found.gradient_difference < 1e-6
    return ours


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_trains_as_one_device_does_with_dropout_and_sums_gradients_once(schedule):
    state, program = same(schedule, (2, 2, 2), 4, 8, dropout=0.1)
    moved = proofs.collectives(program, state.program.mesh)
    held = sum(w.addressable_shards[0].data.nbytes for w in jax.tree.leaves(state.params))
    assert moved.along("batch") == (1, held)  # not once per microbatch
    assert not moved.along("model", kind="all-gather").bytes


def test_documents_latents_and_attention_by_rows_go_through_stages():
    same("ZB-H1", (1, 2, 2), 2, 2, documents=True, latent=8, rotary=4, by_row=True, bias=True,
         remat="products", period=2)


@pytest.mark.parametrize("rules", [Sharding.fully_sharded(regather=True), Sharding.zero2()])
def test_parameters_in_parts_are_gathered_once_and_their_gradients_scattered_once(rules):
    state, program = same("lockstep", (2, 2, 1), 2, 4, rules)
    moved = proofs.collectives(program, state.program.mesh)
    whole = 2 * sum(w.addressable_shards[0].data.nbytes for w in jax.tree.leaves(state.opt_state))
    assert moved.along("batch", kind="all-gather").bytes == whole
    assert moved.along("batch", kind="reduce-scatter").bytes == whole // 2


def useful(m, **changes):
    return proofs.work(alone(m, m, **changes)[1])


@pytest.mark.parametrize("m", [4, 8])
def test_gpipe_turns_m_plus_p_minus_1_times_and_keeps_every_microbatch(m):
    state, program = compiled("gpipe", (1, 4, 1), m, m)
    moved = proofs.collectives(program, state.program.mesh)
    assert moved["collective-permute", ("stage",)] == (2 * (m + 3), 2 * (m + 3) * ROW)
    head = m * 3 * 2 * 8 * 16 * 128
    layers = useful(m) - head
    assert 4 * proofs.work(program) == head + layers * Fraction(m + 3, m)


def test_lockstep_1f1b_does_four_thirds_of_the_work_in_memory_that_does_not_grow():
    needed = []
    for m in (4, 8):
        state, program = compiled("lockstep", (1, 4, 1), m, m, layers=8)
        ticks = m + 6
        once = 1 - Fraction(m, ticks), Fraction(m, ticks)
        taken = dict.fromkeys(["enter", "forward", "leave", "back"], once)
        moved = proofs.collectives(program, state.program.mesh)
        assert moved["collective-permute", ("stage",)] == (2 * ticks, 2 * ticks * ROW)
        head = m * 3 * 2 * 8 * 16 * 128
        assert 4 * proofs.work(program, taken | {"returned": once}) == (
            head + Fraction(4, 3) * (useful(m, layers=8) - head))
        needed.append(program.memory_analysis().temp_size_in_bytes)
    assert needed[1] - needed[0] < ROW


@pytest.mark.parametrize("schedule, make, slots", [
    ("1F1B", split_1f1b, {4: 18, 8: 30}), ("ZB-H1", schedules.zero_bubble, {4: 15, 8: 27})])
def test_a_table_does_the_useful_work_and_no_more_in_its_slots(schedule, make, slots):
    needed = []
    for m, count in slots.items():
        state, program = compiled(schedule, (1, 4, 1), m, m)
        table = table_of(make(4, m))
        assert len(table.part) == count and table.held == 4
        moved = proofs.collectives(program, state.program.mesh, table.taken)
        assert moved["collective-permute", ("stage",)] == (2 * count, 2 * count * ROW)
        assert 4 * proofs.work(program, table.taken) == useful(m)
        needed.append(program.memory_analysis().temp_size_in_bytes)
    assert needed[1] - needed[0] < ROW


def test_a_table_says_who_does_what_when():
    table = table_of(split_1f1b(2, 2))
    assert ["".join("-FBW"[part] for part in row) for row in table.part.T] == [
        "FF-BW-BW", "-FBWFBW-"]
    assert table_of(schedules.zero_bubble(4, 8)).waiting == 4
    assert table.waiting == 1


@pytest.mark.parametrize("p, m", [(1, 3), (2, 1), (3, 2), (4, 8), (5, 7), (8, 16)])
def test_lockstep_takes_as_many_units_as_gpipe_that_recomputes(p, m):
    found = facts(lockstep_events(p, m))
    assert found.makespan == 4 * (m + p - 1)
    assert found.bubble == pytest.approx(schedules.simulate(schedules.gpipe(p, m)).bubble)
    needs = {(s, task): start for s, task, start, _ in lockstep_events(p, m)}
    for s, task, _, end in lockstep_events(p, m):
        after = s + 1 if task.kind == "F" else s - 1
        assert needs.get((after, task), end) >= end  # what it makes is there when it is needed


def test_a_loss_in_evaluation_has_no_dropout():
    state, _ = compiled("lockstep", (2, 2, 2), 4, 8, dropout=0.1)
    one = alone(4, 8)[0]
    with jax.set_mesh(state.program.mesh):
        found = jax.jit(lambda p, b: state.program.loss(p, state.program, b)[0])(
            state.params, state.program.place(batch_of(8)))
    with jax.set_mesh(one.program.mesh):
        expected = one.program.loss(one.params, one.program, one.program.place(batch_of(8)))[0]
    np.testing.assert_allclose(found, expected, rtol=2e-6)


def test_bad_input_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match="1 or more microbatches; found 0"):
        pipelined(gpipe, 0)
    with pytest.raises(ValueError, match="L=4 does not divide over mesh axis 'stage' of size 8"):
        compiled("gpipe", (1, 8, 1), 2, 2)
    with pytest.raises(ValueError, match="8 rows does not divide into 3 parts"):
        compiled("gpipe", (1, 2, 1), 3, 8)
    with pytest.raises(ValueError, match="1 rows, one of 4 parts of a batch, do not divide over 2"):
        compiled("gpipe", (2, 2, 1), 4, 4)
    with pytest.raises(ValueError, match="need layers L that are split over it"):
        state = state_of(pipelined(gpipe, 2), (1, 2, 1), Sharding.none(), SMALL)
        compile_step(state, state.program.place(batch_of(2)), KEY)
    with pytest.raises(ValueError, match="T split over model"):
        compiled("gpipe", (1, 2, 2), 2, 2, Sharding.sequence_parallel())
    with pytest.raises(ValueError, match="rounds of 4, one for each stage; found 6"):
        round_and_round(6, 2)
    with pytest.raises(ValueError, match="one stage on each device; found a schedule with chunks"):
        table_of(schedules.interleaved(2, 4, 2))
