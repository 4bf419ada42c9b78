"""Faults planted in the book's own ViT and MiniGPT: each is a program that trains.

Each is one of meshbook.faults.right_models with a line or two changed, as people change them.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float

from meshbook.faults import Fault, right_models as trials
from meshbook.models import losses
from meshbook.models.losses import (
    CHUNK, chunked_cross_entropy, cross_entropy_sums, language_loss, sums_and_gradients
)
from meshbook.models.vit import Block, ViT, ViTConfig
from meshbook.sharding import Sharding
from meshbook.training import loss_and_metrics

CHUNKS = 16


def _changed(right, **changes):
    return dataclasses.replace(right, **changes)


# The ViT ------------------------------------------------------------------------------------------

class Columns(Sharding):
    """Tensor parallelism with every matrix of the MLP split by columns, the second too."""

    def parameter(self, letters: str):
        return P(None, "model") if letters == "FD" else super().parameter(letters)

    def activation(self, letters: str):
        return self.parameter(letters) if letters == "FD" else super().activation(letters)


def column_after_column():
    """FD split by columns."""
    return _changed(trials.vit(), table=Columns.tensor_parallel())


class Unlabelled(ViT):
    """A ViT whose labels got lost on the way to `create_state`."""

    def __init__(self, *sizes: ViTConfig | Sharding, rngs: nnx.Rngs):
        super().__init__(*sizes, rngs=rngs)
        for _, parameter in nnx.iter_graph(self):
            if isinstance(parameter, nnx.Param):
                parameter.set_metadata("out_sharding", None)


def lost_labels():
    """Every parameter and both moments on every device."""
    return _changed(trials.vit(), model=Unlabelled)


def whole_batch():
    """The batch on every device."""
    put = lambda batch, mesh: jax.device_put(batch, NamedSharding(mesh, P()))
    return _changed(trials.vit(), put=put)


def scaled_gradients():
    """The loss as it is, its gradients four times as large; Adam does not mind."""
    def loss(params, program, batch, key=None):
        value, metrics = loss_and_metrics(params, program, batch, key)
        return 4 * value - jax.lax.stop_gradient(3 * value), metrics

    return _changed(trials.vit(), loss=loss)


class Rounded(Sharding):
    """The rules of full sharding; one weight is rounded to bfloat16 before it is gathered."""

    def used(self, letters: str, w: Float[Array, "..."], dtype: Any):
        short = jnp.bfloat16 if letters == "DF" else dtype
        return super().used(letters, w, short).astype(dtype)


def rounded_gather():
    """`w_in` travels as bfloat16."""
    return _changed(trials.vit("fully_sharded"), table=Rounded.fully_sharded())


class Gathering(Block):
    """A block whose result is replicated, and split again."""

    def __call__(self, x_BTD: Float[Array, "B T D"], key: jax.Array | None = None):
        x_BTD = super().__call__(x_BTD, key)
        whole = jax.reshard(x_BTD, P())
        return jax.reshard(whole, self.mlp.sharding.activation("BTD"))


class GatheringViT(ViT):
    """A ViT of such blocks."""

    block = Gathering


def extra_gather():
    """One reshard too many."""
    return _changed(trials.vit(), model=GatheringViT)


def wrong_preset():
    """data_parallel() where tensor_parallel() was meant."""
    return _changed(trials.vit(), table=Sharding.data_parallel())


class Recomputing(Block):
    """A block that computes its MLP again for the backward pass."""

    def __call__(self, x_BTD: Float[Array, "B T D"], key: jax.Array | None = None):
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD))
        return x_BTD + jax.checkpoint(lambda x: self.mlp(self.norm2(x), key))(x_BTD)


class RecomputingViT(ViT):
    """A ViT of such blocks."""

    block = Recomputing


def recomputed():
    """jax.checkpoint where memory is not short."""
    return _changed(trials.vit(), model=RecomputingViT)


# MiniGPT ------------------------------------------------------------------------------------------

def _loss(cross_entropy):
    return partial(language_loss, cross_entropy=cross_entropy)


def chunks_across_devices():
    """The loss in chunks as one writes it first: JAX wants the axis of chunks whole."""
    def cross_entropy(h_BTD, w_DV, b_V, labels_BT, weight_BT, *, vocabulary, sharding):
        @jax.checkpoint
        def sums(chunk):
            h_nD, labels_n, weight_n = chunk
            logits_nV = jnp.einsum("nD,DV->nV", h_nD, whole_DV) + whole_V
            losses_n = optax.softmax_cross_entropy_with_integer_labels(logits_nV, labels_n)
            right_n = logits_nV.argmax(-1) == labels_n
            return jnp.stack([(losses_n * weight_n).sum(), (right_n * weight_n).sum()])

        h_BTD, whole_DV, whole_V, *tokens = jax.reshard(
            (h_BTD, w_DV, b_V, labels_BT, weight_BT), P())
        chunks = jax.tree.map(
            lambda x: x.reshape(CHUNKS, -1, *x.shape[2:]), (h_BTD, *tokens))
        return jax.lax.map(sums, chunks).sum(0) / weight_BT.sum()

    return _changed(trials.gpt(), loss=_loss(cross_entropy))


def mean_of_means():
    """Each device's mean over its labels that count, and the mean of those."""
    def cross_entropy(h_BTD, w_DV, b_V, labels_BT, weight_BT, *, vocabulary, sharding):
        share = jax.shard_map(lambda w: w / w.sum(), in_specs=P("batch"), out_specs=P("batch"))
        return chunked_cross_entropy(h_BTD, w_DV, b_V, labels_BT, share(weight_BT),
                                     vocabulary=vocabulary, sharding=sharding)

    return _changed(trials.gpt(), loss=_loss(cross_entropy))


def no_documents():
    """Tokens look at the documents before their own."""
    def loss(params, program, batch, key=None):
        seen = {name: x for name, x in batch.items() if name != "segments"}
        return language_loss(params, program, seen, key)

    return _changed(trials.gpt(), loss=loss)


def one_rows_gradient():
    """The head learns from the tokens of one row of devices."""
    def gradients(settings, *arrays):
        found, (dh_nD, *head) = sums_and_gradients(*settings, *arrays)
        first = jax.lax.axis_index("batch") == 0
        return found, (dh_nD, *(jnp.where(first, x, 0) for x in head))

    def cross_entropy(*arrays, vocabulary, sharding):
        settings = losses.split_of(sharding), vocabulary, CHUNK
        return losses.mean_over_devices(
            partial(cross_entropy_sums, *settings), partial(gradients, settings), sharding,
            *arrays)

    return _changed(trials.gpt(), loss=_loss(cross_entropy))


def shifted_targets():
    """Each token is to predict itself: labels that are already shifted, shifted back."""
    def loss(params, program, batch, key=None):
        labels = jnp.roll(batch["labels"], 1, axis=1)
        return language_loss(params, program, {**batch, "labels": labels}, key)

    return _changed(trials.gpt(), loss=loss)


def accuracy_of_eight():
    """The accuracy summed over devices that have the same."""
    def loss(params, program, batch, key=None):
        value, metrics = language_loss(params, program, batch, key)
        return value, metrics | {"accuracy": 8 * metrics["accuracy"]}

    return _changed(trials.gpt(), loss=loss)


FULLY_SHARDED = partial(trials.vit, "fully_sharded")
RIGHT_MODELS = (
    Fault("ViT", "correct, tensor-parallel", (), trials.vit, trials.vit),
    Fault("ViT, fully sharded", "correct", (), FULLY_SHARDED, FULLY_SHARDED),
    Fault("MiniGPT", "correct, tensor-parallel", (), trials.gpt, trials.gpt),
)
MODEL_FAULTS = (
    Fault("ViT: a changed spec", "the second matrix is split by columns, like the first",
          ("sharded", "communicates", "divided"), column_after_column, trials.vit),
    Fault("ViT: labels that got lost", "the partition specs did not reach create_state",
          ("sharded", "communicates"), lost_labels, trials.vit),
    Fault("ViT: a batch on every device", "the batch was placed with P()",
          ("sharded",), whole_batch, trials.vit),
    Fault("ViT: gradients times four", "the loss is right, and Adam divides by their size",
          ("same",), scaled_gradients, trials.vit),
    Fault("ViT: a rounded gather",
          "a fully sharded weight is rounded to bfloat16 before it is gathered",
          ("same",), rounded_gather, FULLY_SHARDED),
    Fault("ViT: one gather too many", "the residual stream is gathered and split again",
          ("communicates",), extra_gather, trials.vit),
    Fault("ViT: the wrong preset", "data_parallel() instead of tensor_parallel()",
          ("sharded", "communicates", "divided"), wrong_preset, trials.vit),
    Fault("ViT: work done again", "jax.checkpoint where memory is not scarce",
          ("divided",), recomputed, trials.vit),
    Fault("MiniGPT: chunks across devices", "the loss reshapes the batch across devices",
          ("communicates", "divided"), chunks_across_devices, trials.gpt),
    Fault("MiniGPT: a mean of means", "each device divides by the number of its own labels",
          ("same",), mean_of_means, trials.gpt),
    Fault("MiniGPT: documents not kept apart", "the segments of the batch do not reach the model",
          ("same",), no_documents, trials.gpt),
    Fault("MiniGPT: a gradient not summed", "the head learns from one data-parallel group",
          ("same",), one_rows_gradient, trials.gpt),
    Fault("MiniGPT: shifted targets", "the labels are the inputs themselves",
          ("same",), shifted_targets, trials.gpt),
    Fault("MiniGPT: accuracy times eight", "summed over devices that have the same value",
          ("same",), accuracy_of_eight, trials.gpt),
)
