"""Checkpointed blocks and microbatches: the same training, less memory, and what it costs."""
import jax
import numpy as np
import pytest
from meshes import on_one_device
from tiny_vit import B, BATCHES, KEY, STILL as CONFIG, compiled, normalised, run

from meshbook import proofs
from meshbook.parallel.remat import CheckpointedViT, in_microbatches
from meshbook.planning import costs
from meshbook.training import loss_and_metrics

PARTS = 4
KINDS = {"plain": {}, "checkpointed": {"model": CheckpointedViT},
         "parts": {"loss": in_microbatches(loss_and_metrics, PARTS)}}


def program(kind="plain", shape=(1, 1)):
    return compiled("tensor_parallel", shape, CONFIG, prepare=normalised, **KINDS[kind])


@pytest.mark.parametrize("shape", [(1, 1), (4, 2)])
@pytest.mark.parametrize("kind", ["checkpointed", "parts"])
def test_training_is_the_same(kind, shape):
    proofs.assert_same_training(run(*program(kind, shape)), run(*program()), BATCHES[:3])


def test_dropout_is_the_same_when_a_block_is_computed_again():
    plain, again = (run(*compiled(**KINDS[kind])) for kind in ("plain", "checkpointed"))
    proofs.assert_same_training(again, plain, BATCHES[:3])


@on_one_device
def test_each_part_draws_its_own_dropout():
    loss = in_microbatches(lambda params, program, batch, key: (
        jax.random.uniform(key) * params, {}), PARTS)
    draws = jax.random.split(KEY, PARTS)
    expected = np.mean([jax.random.uniform(key) for key in draws])
    found = loss(1.0, None, BATCHES[0], KEY)[0]
    assert np.allclose(found, expected) and not np.allclose(found, jax.random.uniform(draws[0]))


def test_parts_take_less_memory():
    """Checkpoints do on a TPU (test_topologies.py); on CPU XLA computes both copies at once."""
    needed = [program(kind)[1].memory_analysis().temp_size_in_bytes for kind in ("parts", "plain")]
    assert needed[0] < needed[1] / 2


def test_a_checkpoint_costs_the_forward_pass_of_the_blocks_again():
    extra = proofs.work(program("checkpointed")[1]) - proofs.work(program()[1])
    T, D, F = CONFIG.tokens, CONFIG.embed, CONFIG.hidden
    block = B * (T * (8 * D * D + 4 * D * F) + 4 * T * T * D)
    last = B * 2 * T * D * F  # the last product of a block is not needed again
    assert extra == CONFIG.layers * (block - last)


def test_parts_cost_no_work_but_travel_each_time():
    state, step = program("parts", (4, 2))
    mesh = state.program.mesh
    proofs.assert_divided(step, 8, *costs.vit_step_flops(CONFIG, B, 2), rtol=1e-9)
    traffic = costs.vit_step_traffic(CONFIG, mesh, B)
    (once, size) = traffic["all-reduce", ("batch",)]
    traffic["all-reduce", ("batch",)] = PARTS * once, PARTS * size
    (sums, size) = traffic["all-reduce", ("model",)]
    traffic["all-reduce", ("model",)] = PARTS * sums, size
    proofs.assert_communicates(step, mesh, traffic)


@on_one_device
def test_what_cannot_be_cut_is_refused():
    with pytest.raises(ValueError, match="16 rows does not divide into 5 parts"):
        in_microbatches(loss_and_metrics, 5)({}, None, BATCHES[0])
    with pytest.raises(ValueError, match="expected 1 or more parts; found 0"):
        in_microbatches(loss_and_metrics, 0)
    with pytest.raises(ValueError, match="labels that all count; found a batch with weights"):
        in_microbatches(loss_and_metrics, 4)({}, None, BATCHES[0] | {"weight": np.ones(B)})
