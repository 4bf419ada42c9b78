"""Checkpointed blocks and microbatches: the same training, less memory, and what it costs."""
import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from meshes import on_one_device
from tiny_vit import KEY, QUICKLY, run

from meshbook import proofs
from meshbook.models import ViT, ViTConfig
from meshbook.parallel.remat import CheckpointedViT, in_microbatches
from meshbook.planning import costs
from meshbook.sharding import Sharding, make_mesh, place
from meshbook.training import as_it_is, create_state, loss_and_metrics, train_step

CONFIG = ViTConfig(embed=32, hidden=64, heads=4, layers=2, patch=8, dropout=0.0)
B, PARTS = 32, 4
SHAPES = [(1, 1), (4, 2)]


def batch(seed):
    random = np.random.default_rng(seed)
    images = random.normal(size=(B, 32, 32, 3)).astype(np.float32)
    return {"inputs": images, "labels": random.integers(0, 10, B).astype(np.int32)}


@functools.cache
def compiled(kind="plain", shape=(1, 1), config=CONFIG):
    model = CheckpointedViT if kind == "checkpointed" else ViT
    loss = in_microbatches(loss_and_metrics, PARTS) if kind == "parts" else loss_and_metrics
    make = lambda: model(config, Sharding.tensor_parallel(), rngs=nnx.Rngs(0))
    mesh = make_mesh(shape)
    state = create_state(make, optax.sgd(0.05, momentum=0.0), mesh, as_it_is, loss)
    with jax.set_mesh(mesh):
        step = train_step.lower(state, place(batch(0), mesh), KEY)
    return state, step.compile(QUICKLY)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["checkpointed", "parts"])
def test_training_is_the_same(kind, shape):
    batches = [batch(seed) for seed in range(3)]
    proofs.assert_same_training(run(*compiled(kind, shape)), run(*compiled()), batches)


def test_dropout_is_the_same_when_a_block_is_computed_again():
    config = ViTConfig(embed=32, hidden=64, heads=4, layers=2, patch=8, dropout=0.5)
    plain, again = (run(*compiled(kind, config=config)) for kind in ("plain", "checkpointed"))
    proofs.assert_same_training(again, plain, [batch(seed) for seed in range(3)])


@on_one_device
def test_each_part_draws_its_own_dropout():
    loss = in_microbatches(lambda params, program, batch, key: (
        jax.random.uniform(key) * params, {}), PARTS)
    draws = jax.random.split(KEY, PARTS)
    expected = np.mean([jax.random.uniform(key) for key in draws])
    found = loss(1.0, None, batch(0), KEY)[0]
    assert np.allclose(found, expected) and not np.allclose(found, jax.random.uniform(draws[0]))


def test_parts_take_less_memory():
    """Checkpoints do on a TPU (test_topologies.py); on CPU XLA computes both copies at once."""
    needed = [compiled(kind)[1].memory_analysis().temp_size_in_bytes for kind in ("parts", "plain")]
    assert needed[0] < needed[1] / 2


def test_a_checkpoint_costs_the_forward_pass_of_the_blocks_again():
    extra = proofs.work(compiled("checkpointed")[1]) - proofs.work(compiled()[1])
    T, D, F = CONFIG.tokens, CONFIG.embed, CONFIG.hidden
    block = B * (T * (8 * D * D + 4 * D * F) + 4 * T * T * D)
    last = B * 2 * T * D * F  # the last product of a block is not needed again
    assert extra == CONFIG.layers * (block - last)


def test_parts_cost_no_work_but_travel_each_time():
    state, program = compiled("parts", (4, 2))
    mesh = state.program.mesh
    proofs.assert_divided(program, 8, *costs.vit_step_flops(CONFIG, B, 2), rtol=1e-9)
    traffic = costs.vit_step_traffic(CONFIG, mesh, B)
    (once, size) = traffic["all-reduce", ("batch",)]
    traffic["all-reduce", ("batch",)] = PARTS * once, PARTS * size
    (sums, size) = traffic["all-reduce", ("model",)]
    traffic["all-reduce", ("model",)] = PARTS * sums, size
    proofs.assert_communicates(program, mesh, traffic)


@on_one_device
def test_what_cannot_be_cut_is_refused():
    with pytest.raises(ValueError, match="32 rows does not divide into 5 parts"):
        in_microbatches(loss_and_metrics, 5)({}, None, batch(0))
    with pytest.raises(ValueError, match="expected 1 or more parts; found 0"):
        in_microbatches(loss_and_metrics, 0)
    with pytest.raises(ValueError, match="labels that all count; found a batch with weights"):
        in_microbatches(loss_and_metrics, 4)({}, None, batch(0) | {"weight": np.ones(B)})
