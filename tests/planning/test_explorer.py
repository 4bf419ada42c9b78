"""The explorer's tables: real arrays lie so, and its layers add up to the estimate of a step."""
import itertools
import math

import jax
import optax
import pytest
from flax import nnx

from meshbook.costs.devices import DEVICES
from meshbook.models import MiniGPT, MiniGPTConfig, ViT, ViTConfig
from meshbook.planning.estimates import PRESETS, estimate
from meshbook.planning.explorer import layer_exchanges, notation, step_total, tensors
from meshbook.sharding import Sharding, make_mesh
from meshbook.training import create_state

V5E = DEVICES["TPU v5e"]
MODELS = {
    "ViT": (ViT, ViTConfig(embed=48, hidden=96, heads=4, layers=2)),
    "MiniGPT": (MiniGPT, MiniGPTConfig(250, tokens=24, embed=48, hidden=96, heads=4, layers=2)),
}
MESHES = ((1, 1), (8, 1), (4, 2), (2, 4), (1, 8), (16, 4), (3, 2))


def sizes(shape):
    return dict(zip(("batch", "model"), shape))


@pytest.mark.parametrize("name, preset, shape", [
    *itertools.product(MODELS, PRESETS, [(4, 2)]), ("ViT", "fully_sharded", (2, 4)),
    ("MiniGPT", "fully_sharded", (8, 1))])
def test_real_arrays_lie_as_the_table_says(name, preset, shape):
    Model, config = MODELS[name]
    mesh, rules = make_mesh(shape), getattr(Sharding, preset)()
    state = create_state(lambda: Model(config, rules, rngs=nnx.Rngs(0)), optax.sgd(0.1), mesh)
    arrays = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.params):
        words = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        arrays["/".join(words[2 * (words[0] == "blocks"):])] = leaf
    found = [each for each in tensors(config, preset, sizes(shape), 16) if each.is_parameter]
    assert {each.name for each in found} == arrays.keys()
    for each in found:
        array = arrays[each.name]
        spec = (*array.sharding.spec, *[None] * (array.ndim - len(array.sharding.spec)))
        assert (each.shape, each.spec) == (array.shape, spec)
        for shard in array.addressable_shards:
            assert (each.held, each.bytes) == (shard.data.shape, shard.data.nbytes)


@pytest.mark.parametrize("name, preset, shape, batch", [
    *itertools.product(MODELS, PRESETS, MESHES, [48]), ("ViT", "data_parallel", (4, 2), 7)])
def test_the_layers_add_up_to_the_estimate_or_both_refuse(name, preset, shape, batch):
    config, mesh = MODELS[name][1], sizes(shape)
    try:
        expected = estimate(config, preset, mesh, batch, V5E)
    except ValueError:
        with pytest.raises(ValueError, match="divi[ds]"):
            tensors(config, preset, mesh, batch)
        return
    held = tensors(config, preset, mesh, batch)
    bytes_of = lambda block: sum(each.bytes for each in held
                                 if each.is_parameter and (each.layer == "block") == block)
    assert bytes_of(False) + config.layers * bytes_of(True) == expected.memory["parameters"]
    found = step_total(layer_exchanges(config, preset, mesh, batch), config.layers)
    assert found.keys() == expected.traffic.keys()
    for key, moved in expected.traffic.items():
        assert found[key].bytes == moved.bytes
        if found[key].count is not None:
            assert found[key].count == moved.count


def test_what_is_wrong_is_said():
    with pytest.raises(ValueError, match="expected one of data_parallel.*found 'none'"):
        tensors(ViTConfig(), "none", sizes((1, 1)), 8)


def test_a_tensor_is_written_as_in_the_book():
    found = {notation(each): each for each in tensors(ViTConfig(), "fully_sharded",
                                                      sizes((4, 2)), 64)}
    assert "mlp/w_in[D_batch, F_model]" in found and "query[B_batch, T, H_model, K]" in found
    each = found["attention/w_qkv[D_batch, S, H_model, K]"]
    assert each.held == (96, 3, 4, 48) and each.bytes == 4 * math.prod(each.held)


@pytest.mark.parametrize("config, embedding, head", [
    (ViTConfig(), {"w_patch_XD", "b_patch_D", "class_D", "position_TD"},
     {"norm/scale_D", "norm/bias_D", "w_head_DC", "b_head_C"}),
    (MiniGPTConfig(250), {"token_VD", "position_TD"}, {"w_head_DV", "b_head_V"})])
def test_each_parameter_is_in_the_layer_that_uses_it(config, embedding, head):
    found = [each for each in tensors(config, "tensor_parallel", sizes((4, 2)), 8)
             if each.is_parameter]
    outside = {layer: {each.name for each in found if each.layer == layer}
               for layer in ("embedding", "head")}
    assert outside == {"embedding": embedding, "head": head}
    rest = {each.name.partition("/")[0] for each in found if each.layer == "block"}
    assert rest == {"norm1", "attention", "norm2", "mlp"}
