"""The formulas of a ViT's and a MiniGPT's step, for sizes and meshes that nobody chose."""
import jax
import numpy as np
import optax
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from properties import examples, shapes
from test_decoder_costs import numbers_held
from tiny_vit import normalised

from meshbook import proofs
from meshbook.hlo.collectives import Moved
from meshbook.models import MiniGPT, MiniGPTConfig, ViT, ViTConfig
from meshbook.models.losses import language_loss
from meshbook.planning import costs
from meshbook.sharding import Sharding, make_mesh
from meshbook.training import abstract_state, clipped, compile_step

A_FEW = st.integers(1, 3)


@st.composite
def layouts(draw):
    """(preset, shape of a mesh, rows of a batch, sizes of a model's blocks that divide over it).

    A device has two of each unit at least: a product over one number is a multiplication, which a
    compiler may do in several places.
    """
    preset = draw(st.sampled_from(["data_parallel", "tensor_parallel", "fully_sharded"]))
    shape = rows, ways = draw(shapes(axes=2).filter(lambda shape: len(shape) == 2))
    if preset == "data_parallel":
        shape = rows, ways = rows * ways, 1
    heads = ways * draw(A_FEW)
    sizes = dict(heads=heads, embed=heads * rows * draw(st.integers(2, 4)), layers=draw(A_FEW),
                 hidden=rows * ways * draw(st.integers(2, 6)))
    return preset, shape, rows * draw(A_FEW), sizes


def step(config, build, preset, shape, optimizer, more, inputs, labels):
    """(parameters as shapes, mesh, compiled step)."""
    mesh, rules = make_mesh(shape), getattr(Sharding, preset)()
    state = abstract_state(lambda: build(config, rules, rngs=nnx.Rngs(0)), optimizer, mesh, **more)
    spec = NamedSharding(mesh, P("batch"))
    batch = {"inputs": jax.ShapeDtypeStruct(*inputs, sharding=spec),
             "labels": jax.ShapeDtypeStruct(*labels, sharding=spec)}
    key = jax.eval_shape(lambda: jax.random.key(0))
    return state.params, mesh, compile_step(state, batch, key)


@examples(4)
@given(layouts(), st.integers(1, 3), st.integers(1, 4), st.integers(2, 5))
def test_a_vits_parameters_work_and_bytes_are_those_of_any_program(layout, patch, across, classes):
    preset, (rows, ways), images, sizes = layout
    images = max(images, 2)  # JAX finds no sharding for the labels of a single one
    config = ViTConfig(image=patch * across, patch=patch, classes=classes, **sizes)
    params, mesh, program = step(
        config, ViT, preset, (rows, ways), optax.sgd(0.1), {"prepare": normalised},
        ((images, config.image, config.image, 3), np.uint8), ((images,), np.int32))
    stored = rows if preset == "fully_sharded" else 1
    assert numbers_held(params) == costs.vit_parameters(config, ways, stored)
    proofs.assert_divided(program, mesh.size, *costs.vit_step_flops(config, images, ways),
                          rtol=1e-9)
    traffic = costs.vit_step_traffic(config, mesh, images)
    if stored > 1:
        gathers = costs.step_gathers(costs.vit_parameters, config, mesh)
        traffic["all-gather", "batch"] = Moved(10 * config.layers + 7, gathers)
    proofs.assert_communicates(program, mesh, traffic)


@examples(4)
@given(layouts(), st.integers(2, 9) | st.just(260), A_FEW, st.booleans())
def test_a_minigpts_parameters_work_and_bytes_are_those_of_any_program(
        layout, tokens, words, clip):
    preset, (rows, ways), texts, sizes = layout
    config = MiniGPTConfig(vocabulary=128 * rows * ways * words - 5, tokens=tokens, **sizes)
    optimizer = optax.chain(clipped(1.0), optax.sgd(0.1)) if clip else optax.sgd(0.1)
    array = (texts, tokens), np.int32
    params, mesh, program = step(config, MiniGPT, preset, (rows, ways), optimizer,
                                 {"loss": language_loss}, array, array)
    stored = rows if preset == "fully_sharded" else 1
    assert numbers_held(params) == costs.gpt_parameters(config, ways, stored)
    proofs.assert_divided(program, mesh.size, *costs.gpt_step_flops(config, texts), rtol=1e-9)
    traffic = costs.gpt_step_traffic(config, mesh, texts, clip, sharded=stored > 1)
    if stored > 1:
        gathers = costs.step_gathers(costs.gpt_parameters, config, mesh)
        traffic["all-gather", "batch"] = Moved(10 * config.layers + 3, gathers)
    proofs.assert_communicates(program, mesh, traffic)
