"""The sources' own models: their logits from this book's code on any mesh, and what labels do."""
import dataclasses

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from tiny_gpt import CONFIG as GPT, place_all, tiny_state
from tiny_vit import BATCHES, CONFIG as VIT, make_state

from meshbook import proofs
from meshbook.models import published as models
from meshbook.models.published import PublishedMiniGPT, PublishedViT, gpt_weights, vit_weights
from meshbook.sharding import make_mesh

IMAGES = np.random.default_rng(0).normal(size=(16, 32, 32, 3)).astype(np.float32)
TOKENS = np.random.default_rng(0).integers(0, 250, (8, 16)).astype(np.int32)
SHORT = dataclasses.replace(VIT, layers=1)
MESHES = [("none", (1, 1)), ("tensor_parallel", (8, 1)), ("tensor_parallel", (4, 2)),
          ("tensor_parallel", (2, 4)), ("fully_sharded", (4, 2))]


def published(kind, config):
    """A model of the sources on one device, of which no bias is 0 and no scale 1; no dropout."""
    with nnx.use_eager_sharding(False):
        model = kind(config, rngs=nnx.Rngs(1))
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        drawn = np.random.default_rng(len(str(path))).normal(size=leaf.shape) * 0.1
        leaf[...] = leaf[...] + drawn.astype(np.float32)
    model.eval()
    return model


@nnx.jit
def read(model, inputs):
    return model(inputs)


@pytest.mark.parametrize("row, shape", MESHES)
@pytest.mark.parametrize("model", ["ViT", "MiniGPT"])
def test_the_sources_weights_give_the_sources_logits(model, row, shape):
    if model == "ViT":
        source, state, inputs = published(PublishedViT, VIT), make_state(row, shape), IMAGES
        ours = vit_weights(source)
    else:
        source, state, inputs = published(PublishedMiniGPT, GPT), tiny_state(row, shape), TOKENS
        ours = gpt_weights(source, GPT.padded)
    assert jax.tree.map(np.shape, ours) == jax.tree.map(np.shape, state.params)
    program = state.program
    placed = place_all(ours, program.specs[0], program.mesh)
    with jax.set_mesh(program.mesh):
        found = np.asarray(jax.jit(program.apply)(placed, program.place({"x": inputs})["x"]))
    right = read(source, inputs)
    np.testing.assert_allclose(found[..., :right.shape[-1]], right, atol=3e-5)
    assert np.abs(right - right.mean(0)).max() > 0.1


@nnx.jit
def step(model, optimizer, images, labels):
    def loss(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def trained(shape, acts):
    """(losses, the step's work on all devices, its collectives, the MLP's first kernel)."""
    @nnx.jit
    def make():
        model = PublishedViT(SHORT, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    mesh = make_mesh(shape, axis_types=AxisType.Auto)
    with jax.set_mesh(mesh), nnx.use_eager_sharding(acts):
        model, optimizer = make()
    batch = jax.device_put(
        {"images": IMAGES, "labels": BATCHES[0]["labels"]}, NamedSharding(mesh, P("batch")))
    program = step.lower(model, optimizer, **batch).compile()
    losses = [float(step(model, optimizer, **batch)) for _ in range(3)]
    work = proofs.work(program.compiled) * mesh.size
    return losses, work, proofs.collectives(program.compiled, mesh), model.encoder_blocks[0].mlp.fc1.kernel


def test_on_an_auto_mesh_labels_split_where_they_act_and_double_the_work_where_they_do_not():
    alone, useful, _, _ = trained((1, 1), True)
    for shape, acts, work, pieces in (
            ((8, 1), True, 1, (32, 64)), ((4, 2), True, 1, (32, 32)), ((4, 2), False, 2, (32, 64))):
        losses, found, moved, kernel = trained(shape, acts)
        np.testing.assert_allclose(losses, alone, rtol=2e-6)
        assert found == work * useful
        assert kernel.get_metadata()["out_sharding"] == (None, "model")
        assert {x.data.shape for x in kernel[...].addressable_shards} == {pieces}
        assert (sum(each.count for each in moved.values()) > 1) == (shape == (4, 2) and acts)


def test_ten_classes_do_not_divide_over_four(monkeypatch):
    monkeypatch.setattr(models, "PublishedEncoder", lambda *_, **__: None)  # takes a minute
    with jax.set_mesh(make_mesh((2, 4), axis_types=AxisType.Auto)):
        with pytest.raises(ValueError, match="10"):
            PublishedViT(SHORT, rngs=nnx.Rngs(0))


def test_dropout_is_on_where_the_sources_have_it():
    vit, gpt = published(PublishedViT, VIT), published(PublishedMiniGPT, GPT)
    training = nnx.jit(lambda model, tokens: model(tokens, training=True))
    assert (read(vit, IMAGES) == read(vit, IMAGES)).all()
    assert (read(gpt, TOKENS) == read(gpt, TOKENS)).all()
    assert (training(gpt, TOKENS) != read(gpt, TOKENS)).any()
    vit.train()
    assert (read(vit, IMAGES) != read(vit, IMAGES)).any()


def test_annotations_by_name_and_as_the_post_spells_them_make_the_same_weights():
    """The post's NamedSharding of a mesh: the same numbers, the same split once labels act."""
    mesh = make_mesh((4, 2), axis_types=AxisType.Auto)
    spelled = {"kernel_init": nnx.with_partitioning(
                   models.XAVIER, NamedSharding(mesh, P(None, "model"))),
               "bias_init": nnx.with_partitioning(models.ZEROS, NamedSharding(mesh, P("model")))}
    for act, width in ((False, VIT.hidden), (True, VIT.hidden // 2)):
        with nnx.use_eager_sharding(act):
            theirs = nnx.Linear(VIT.embed, VIT.hidden, rngs=nnx.Rngs(0), **spelled)
            with jax.set_mesh(mesh):
                ours = models.PublishedMLP(VIT, nnx.Rngs(0)).fc1
        for layer in theirs, ours:
            assert {shard.data.shape for shard in layer.kernel[...].addressable_shards} == {
                (VIT.embed, width)}
        np.testing.assert_array_equal(theirs.kernel[...], ours.kernel[...])


class Counting(PublishedMiniGPT):
    """After a token comes the next number; `seen` is what the model is asked about."""

    def __init__(self, seen, maxlen):
        self.look, self.maxlen = seen.append, maxlen

    def __call__(self, inputs, training=False):
        self.look(inputs.tolist())
        return jax.nn.one_hot(inputs + 1, 20)


def test_the_source_writes_by_asking_about_its_first_tokens_filled_up_with_zeros():
    seen = []
    assert Counting(seen, 4).generate(5, [1, 2], top_k=1) == [3, 4, 5, 5, 5]
    assert seen == [[[1, 2, 0, 0]], [[1, 2, 3, 0]], *[[[1, 2, 3, 4]]] * 3]
    seen.clear()
    assert Counting(seen, 4).generate(2, [7, 8, 9, 11, 13], top_k=1) == [12, 12]
    assert seen == [[[7, 8, 9, 11]]] * 2
