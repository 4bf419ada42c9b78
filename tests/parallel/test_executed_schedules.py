"""Schedules executed: gradients of one device, work, bytes held and sent, order, bad input."""
import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from meshbook import proofs
from meshbook.parallel.schedule_execution import execute, expected_held, to_mesh
from meshbook.parallel.schedules import (
    Task, gpipe, interleaved, one_f_one_b, simulate, split_backward, zero_bubble)
from meshbook.parallel.stage_programs import compile_stages, kept_after, stage_meshes
from meshbook.proofs.transfers import transfers

B, D, F = 4, 8, 16
U = 4 * B * D  # bytes of an activation
SPECS = {"in": P(None, "model"), "out": P("model")}


def layer(w, x_BD, hidden, out):
    h_BF = jax.nn.gelu(jnp.einsum("BD,DF->BF", x_BD, w["in"], out_sharding=hidden))
    return x_BD + jnp.einsum("BF,FD->BD", h_BF, w["out"], out_sharding=out)


def middle(w, x_BD, batch):
    return layer(w, x_BD, P(None, "model"), P())


def last(w, x_BD, batch):
    return jnp.square(middle(w, x_BD, batch) - batch["labels"]).mean()


@functools.cache
def weights_of(stages):
    random = np.random.default_rng(0)
    draw = lambda *shape: random.normal(size=shape).astype(np.float32) / 8
    return [{"in": draw(D, F), "out": draw(F, D)} for _ in range(stages)]


@functools.cache
def compiled(p, chunks=1, ways=2):
    meshes, count = stage_meshes(p, (1, ways)), p * chunks
    placed = [{key: jax.device_put(w[key], NamedSharding(meshes[s % p], SPECS[key])) for key in w}
              for s, w in enumerate(weights_of(count))]
    with jax.default_matmul_precision("highest"):
        return compile_stages([middle] * (count - 1) + [last], placed, meshes, batches(1)[0])


def batches(m):
    random = np.random.default_rng(1)
    draw = lambda: random.normal(size=(B, D)).astype(np.float32)
    return [{"inputs": draw(), "labels": draw()} for _ in range(m)]


def on_one_device(weights, given):
    def loss(weights):
        total = 0
        for batch in given:
            x_BD = batch["inputs"]
            for w in weights:
                x_BD = x_BD + jax.nn.gelu(x_BD @ w["in"]) @ w["out"]
            total += jnp.square(x_BD - batch["labels"]).mean()
        return total / len(given)

    with jax.default_matmul_precision("highest"):
        return jax.jit(jax.value_and_grad(loss))(weights)


def schedules(p, m):
    return {"gpipe": gpipe(p, m), "1f1b": one_f_one_b(p, m), "zero bubble": zero_bubble(p, m),
            "split gpipe": split_backward(gpipe(p, m))}


def check_step(schedule, stages, m):
    given = batches(m)
    with transfers() as counted:
        found = execute(schedule, stages, given)
    loss, gradients = on_one_device(weights_of(len(stages)), given)
    np.testing.assert_allclose(np.mean(found.losses), loss, rtol=1e-6)
    for one, other in zip(jax.tree.leaves(found.gradients), jax.tree.leaves(gradients),
                          strict=True):
        assert np.linalg.norm(one - other) <= 1e-6 * np.linalg.norm(other)
    each = U * stages[0].mesh.size  # an activation is on all devices of a stage
    assert found.sent == {pair: n * each for pair, n in simulate(schedule).sent.items()}
    assert counted.bytes == sum(found.sent.values())
    assert found.held == expected_held(found.events, stages)
    return found


def tasks_by_device(events):
    return {device: [event.task for event in events if event.device == device]
            for device in sorted({event.device for event in events})}


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero bubble", "split gpipe"])
@pytest.mark.parametrize("p, m", [(4, 8), (4, 2), (2, 5)])
def test_a_step_is_that_of_one_device_in_the_order_of_the_schedule(p, m, name):
    schedule = schedules(p, m)[name]
    found = check_step(schedule, compiled(p), m)
    assert tasks_by_device(found.events) == dict(enumerate(schedule))
    assert found.events == simulate(schedule).events


def watched(stages, calls):
    """The same stages, whose programs write down (stage, kind) when they are called."""
    def program(number, kind, part):
        def call(*given):
            calls.append((number, kind))
            return part.program(*given)

        return part._replace(program=call)

    return [stage._replace(parts={kind: program(number, kind, part)
                                  for kind, part in stage.parts.items()})
            for number, stage in enumerate(stages)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero bubble"])
def test_programs_are_called_in_the_order_of_the_schedule(name):
    schedule, calls = schedules(4, 8)[name], []
    execute(schedule, watched(compiled(4), calls), batches(8))
    for device, tasks in enumerate(schedule):
        assert "".join(task.kind for task in tasks) == "".join(
            kind for number, kind in calls if number == device)


def test_losses_are_in_the_order_of_the_microbatches():
    backwards = [[task._replace(microbatch=3 - task.microbatch) for task in tasks]
                 for tasks in one_f_one_b(4, 4)]
    one, other = (execute(schedule, compiled(4), batches(4)).losses
                  for schedule in (one_f_one_b(4, 4), backwards))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("split", [False, True])
def test_two_chunks_per_device(split):
    schedule = interleaved(2, 4, 2)
    check_step(split_backward(schedule) if split else schedule, compiled(2, 2), 4)


def test_on_one_device_nothing_is_sent():
    assert check_step(zero_bubble(1, 3), compiled(1), 3).sent == {}


def test_chunks_on_one_device():
    assert check_step(interleaved(1, 2, 2), compiled(1, 2), 2).sent == {}


def test_three_programs_do_the_same_work():
    for stage in compiled(4):
        for part in stage.parts.values():
            assert proofs.work(part.program) * 2 == 2 * 2 * B * D * F
            assert {kind for kind, _ in proofs.collectives(part.program, stage.mesh)} <= {
                "all-reduce"}


def test_no_microbatch_keeps_a_weight():
    for stage in compiled(4):
        shapes = {v.aval.shape for kind in "FB" for v in kept_after(stage, kind)}
        assert shapes <= {(), (B, D), (B, F)}  # (): the gradient of the loss
        assert kept_after(stage, "W") == set()


def test_live_microbatches_as_measured_on_the_devices():
    # of a microbatch wait x and the hidden units' inputs, 1 + F / D / ways activations
    each, m = U * (1 + F // D // 2), 8
    for schedule, live in ((gpipe(4, m), [m] * 3), (one_f_one_b(4, m), [4, 3, 2])):
        found = execute(schedule, compiled(4), batches(m))
        most = [max(held for held, event in zip(found.held, found.events) if event.device == d)
                for d in range(3)]
        assert [held // each for held in most] == live == simulate(schedule).live[:3]


def test_stages_with_tokens_norms_and_a_loop():
    """Inputs without a gradient, and layers in a scan, whose weights are not kept either."""
    def first(w, x_B, batch):
        return w["table"].at[x_B].get(out_sharding=P("batch"))

    def looped(w, x_BD, batch):
        def turn(x_BD, each):
            return x_BD + jnp.tanh(x_BD @ each), None

        return jax.lax.scan(turn, x_BD, w["layers"])[0]

    def loss(w, x_BD, batch):
        return jnp.square(looped(w, x_BD, batch) * batch["scale"]).mean()

    random = np.random.default_rng(2)
    draw = lambda *shape: random.normal(size=shape).astype(np.float32) / 2
    weights = [{"table": draw(11, D)}, {"layers": draw(3, D, D)}, {"layers": draw(2, D, D)}]
    given = [{"inputs": random.integers(0, 11, B).astype(np.int32), "scale": draw(B, 1)}
             for _ in range(3)]
    meshes = stage_meshes(3)
    placed = [jax.device_put(w, NamedSharding(mesh, P())) for w, mesh in zip(weights, meshes)]
    stages = compile_stages([first, looped, loss], placed, meshes, given[0])
    assert [[proofs.work(part.program) for part in stage.parts.values()] for stage in stages] == [
        [0, 0, 0], [3 * 2 * B * D * D] * 3, [2 * 2 * B * D * D] * 3]
    found = execute(zero_bubble(3, 3), stages, given)

    def whole(weights):
        losses = [loss(weights[2], looped(weights[1], weights[0]["table"][batch["inputs"]], batch),
                       batch) for batch in given]
        return sum(losses) / len(losses)

    for one, other in zip(jax.tree.leaves(found.gradients),
                          jax.tree.leaves(jax.grad(whole)(weights)), strict=True):
        assert np.linalg.norm(one - other) <= 1e-6 * np.linalg.norm(other)


def test_what_is_sent_another_way_is_counted():
    def around(x, mesh):
        return to_mesh(to_mesh(x, hub), mesh)

    stages = compiled(4)
    hub, direct = stages[0].mesh, simulate(gpipe(4, 2)).sent
    with transfers() as counted:
        found = execute(gpipe(4, 2), stages, batches(2), send=around)
    more = 2 * 4  # a message that neither leaves nor reaches stage 0 goes twice
    assert counted.bytes - sum(found.sent.values()) == more * U * 2
    assert Counter(found.sent).total() == sum(direct.values()) * U * 2


def test_bad_input():
    stages = compiled(2)
    with pytest.raises(ValueError, match="the schedule has 4 stages; found 2"):
        execute(gpipe(4, 2), stages, batches(2))
    with pytest.raises(ValueError, match="the schedule has 3 microbatches; found 2"):
        execute(gpipe(2, 3), stages, batches(2))
    with pytest.raises(ValueError, match="device 1: expected F, B and W"):
        execute([[Task("F", 0), Task("BW", 0)], [Task("F", 0)]], stages, batches(1))
    with pytest.raises(ValueError, match="5 stages of 2 devices need 10; JAX has 8"):
        stage_meshes(5, (1, 2))
    with pytest.raises(ValueError, match="expected weights of 2 stages; found 1"):
        compile_stages([middle, last], [stages[0].weights], [stages[0].mesh], batches(1)[0])
    with pytest.raises(ValueError, match=r"the loss, a scalar; found \(4, 8\)"):
        compile_stages([middle], [stages[0].weights], [stages[0].mesh], batches(1)[0])
