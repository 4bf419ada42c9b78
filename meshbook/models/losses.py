"""Cross-entropy over a large vocabulary, whose logits (B, T, V) never exist at once.

Each device cuts its own tokens into chunks. For a chunk it makes the logits, what they
cost, and at once their gradients, and forgets them: the gradients of hidden and head are
ready when the loss is, and nothing is computed twice. The head's gradient is summed over
the rows of devices once, after the loop. Where the vocabulary is split over a mesh axis,
three numbers a token travel along it, a maximum and two sums, and the hidden gradient.

Sources: Shoeybi et al. 2019 (a vocabulary in parts); Hsu et al. 2024, "Liger Kernel"
(gradients made in the forward pass).
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Shaped

from meshbook.models.text_models import MASKED, Hidden
from meshbook.parallel.sequence import gathered_tokens, split_tokens
from meshbook.sharding import Sharding, shard_map_over_the_rest, summed
from meshbook.training.state import Program, check_labels

CHUNK = 512  # tokens of one device whose logits are there at once


def chunked_cross_entropy(
    hidden_BTD: Float[Array | np.ndarray, "B T D"], w_DV: Float[Array | np.ndarray, "D V"],
    b_V: Float[Array | np.ndarray, "V"], labels_BT: Int[Array | np.ndarray, "B T"],
    weight_BT: Float[Array | np.ndarray, "B T"] | None = None, *,
    vocabulary: int, sharding: Sharding, chunk: int = CHUNK,
):
    """Mean loss (nats) and accuracy of logits hidden·w + b, chunk by chunk.

    weight_BT: what each label counts, default 1; it has no gradient. vocabulary: how many of the V
    logits are tokens; a label beyond gives NaN. chunk: tokens of one device at a time. A tie for
    the largest logit counts as right. Not for second derivatives.
    """
    settings = split_of(sharding), vocabulary, chunk
    return mean_over_devices(
        partial(cross_entropy_sums, *settings), partial(sums_and_gradients, *settings),
        sharding, hidden_BTD, w_DV, b_V, labels_BT, weight_BT)


def split_of(sharding: Sharding):
    """The mesh axis over which the vocabulary is split, or None."""
    spec = sharding.activation("V")
    return spec[0] if spec else None


def mean_over_devices(
    sums: Callable, gradients: Callable, sharding: Sharding,
    hidden_BTD: Float[Array | np.ndarray, "B T D"], w_DV: Float[Array | np.ndarray, "D V"],
    b_V: Float[Array | np.ndarray, "V"], labels_BT: Int[Array | np.ndarray, "B T"],
    weight_BT: Float[Array | np.ndarray, "B T"] | None,
):
    """Mean loss and accuracy, from the sums over each device's own tokens.

    sums(h_nD, w_Dv, b_v, labels_n, weight_n) -> (loss, right answers), over
    the whole vocabulary where w and b are one device's part of it;
    gradients(the same) -> (sums, the loss's gradients to h, w and b).
    """
    s, dtype = sharding, hidden_BTD.dtype
    BT = P(*s.activation("BTV")[:2])  # what splits V leaves tokens whole
    count = labels_BT.size if weight_BT is None else jax.lax.stop_gradient(weight_BT.sum())
    if weight_BT is None:
        weight_BT = jnp.ones(labels_BT.shape, jnp.float32)
    hidden_BTD = jax.reshard(hidden_BTD, s.activation("BTD"))
    if split_tokens(BT) != split_tokens(s.activation("BTD")):
        hidden_BTD = gathered_tokens(hidden_BTD)
    arguments = (
        hidden_BTD,
        s.used("DV", w_DV, dtype), s.used("V", b_V, dtype),
        jax.reshard(labels_BT, BT), jax.reshard(weight_BT, BT),
    )
    where = BT, s.activation("DV"), s.activation("V"), BT, BT
    loss, right = total((sums, gradients, where), *arguments)
    return tuple(times(x, 1 / jnp.float32(count)) for x in (loss, right))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def total(how: tuple, *arguments: Array):
    """Sums over all tokens: (loss, right answers). Its gradient is written out."""
    sums, _, where = how
    rows, _ = axes = split_axes(where)
    waits = waiting(arguments[1])

    def local(*tokens):
        return summed(sums(*flat(axes, *tokens)), rows, waits)

    specs = (P(unreduced=waits),) * 2
    return shard_map_over_the_rest(local, where, specs)(*map(jax.reshard, arguments, where))


def waiting(w: Float[Array, "..."]):
    """The mesh axes over which the gradient of w is not summed here, but later: see `reduced`."""
    return jax.typeof(w).sharding.spec.reduced


def split_axes(where: tuple):
    """The mesh axes that split the tokens, and those that split the vocabulary."""
    _, _, V, BT, _ = where
    return tuple(tuple(jax.tree.leaves(tuple(spec))) for spec in (BT, V))


def flat(axes: tuple, h_bTD: Float[Array, "b T D"], w_Dv: Float[Array, "D v"],
         b_v: Float[Array, "v"], labels_bT: Int[Array, "b T"], weight_bT: Float[Array, "b T"]):
    """One device's tokens in a row; what each adds to a gradient is its own."""
    rows, ways = axes
    varying = partial(jax.lax.pcast, to="varying")
    h_nD = varying(h_bTD.reshape(-1, h_bTD.shape[-1]), ways)
    w_Dv, b_v = varying((w_Dv, b_v), rows)
    return h_nD, w_Dv, b_v, labels_bT.ravel(), weight_bT.ravel()


def total_forward(how: tuple, *arguments: Array):
    """The sums and, made on the way, the loss's gradients to hidden, w and b."""
    _, gradients, where = how
    rows, ways = axes = split_axes(where)
    scattered, *waits = [waiting(x) for x in arguments[:3]]

    def local(h_bTD, *others):
        found, (dh_nD, *head) = gradients(*flat(axes, h_bTD, *others))
        # sums and the head's gradients are added up once, after the loop, or later still
        ours = zip((*found, *head), (waits[0], waits[0], *waits), strict=True)
        found = [summed(x, rows, later) for x, later in ours]
        dh_nD = summed(dh_nD, ways, scattered)
        return tuple(found[:2]), (dh_nD.reshape(h_bTD.shape), *found[2:])

    later = scattered, *waits
    found = tuple(P(*spec, unreduced=axes) for spec, axes in zip(where[:3], later, strict=True))
    specs = (P(unreduced=waits[0]),) * 2, found
    return shard_map_over_the_rest(local, where, specs)(*map(jax.reshard, arguments, where))


def total_backward(how: tuple, gradients: tuple, cotangents: tuple):
    return *(times(x, cotangents[0]) for x in gradients), None, None


def times(x: Float[Array, "..."], factor: Float[Array, ""]):
    """x, also a partial sum, times a number: for a partial sum it is typed `reduced`."""
    waits = jax.typeof(x).sharding.spec.unreduced
    if waiting(factor) != waits:
        factor = jax.reshard(factor, P(reduced=waits))
    return (x * factor).astype(x.dtype)


total.defvjp(total_forward, total_backward)


def language_loss(params: Any, program: Program, batch: Mapping[str, Array | np.ndarray],
                  key: jax.Array | None = None, cross_entropy: Callable = chunked_cross_entropy):
    """Mean cross-entropy (nats) of the next token, and a batch's metrics.

    A `loss` for meshbook.training, for models with `hidden` and a head, such as MiniGPT. batch:
    inputs and labels (B, T), and optionally segments, positions and weight (B, T), 0 for labels
    that do not count. key None: evaluation. cross_entropy: see chunked_cross_entropy.
    """
    model, given = model_and_inputs(params, program, batch, key)
    return loss_of(model.hidden(*given), model, program, batch, cross_entropy)


def model_and_inputs(params: Any, program: Program, batch: Mapping, key: jax.Array | None):
    """The model, and what its `hidden` is given: inputs, key, segments, positions."""
    keys = (None, None) if key is None else jax.random.split(key)
    model = program.model(params)
    inputs = program.prepare(batch["inputs"], keys[0])
    check_labels(batch["labels"], model.config.vocabulary)
    return model, (inputs, keys[1], batch.get("segments"), batch.get("positions"))


def loss_of(hidden_BTD: Hidden, model: Any, program: Program, batch: Mapping,
            cross_entropy: Callable = chunked_cross_entropy):
    """Mean cross-entropy and metrics, of what the head reads."""
    with jax.named_scope("loss"):
        loss, accuracy = cross_entropy(
            hidden_BTD, model.w_head_DV[...], model.b_head_V[...], batch["labels"],
            batch.get("weight"), vocabulary=model.config.vocabulary, sharding=model.sharding)
        if not program.waits:
            loss, accuracy = map(added_up, (loss, accuracy))
    return loss, {"loss": loss, "accuracy": accuracy}


def added_up(x: Float[Array, ""]):
    """A partial sum added up over the devices; anything else as it is."""
    return jax.reshard(x, P()) if jax.typeof(x).sharding.spec.unreduced else x


def cross_entropy_sums(
    axis: str | tuple[str, ...] | None, vocabulary: int, chunk: int, h_nD: Float[Array, "n D"],
    w_Dv: Float[Array, "D v"], b_v: Float[Array, "v"], labels_n: Int[Array, "n"],
    weight_n: Float[Array, "n"],
):
    """Sums over this device's tokens: (loss, right answers), weighted.

    axis: the mesh axis over which the vocabulary is split, or None.
    """
    def turn(sums, part):
        more, _ = chunk_sums(axis, vocabulary, w_Dv, b_v, *part)
        return jax.tree.map(jnp.add, sums, more), None

    parts = cut(chunk, h_nD, labels_n, weight_n)
    zero = jnp.zeros_like(weight_n[0])
    return jax.lax.scan(turn, (zero, zero), parts)[0]


def sums_and_gradients(
    axis: str | tuple[str, ...] | None, vocabulary: int, chunk: int, h_nD: Float[Array, "n D"],
    w_Dv: Float[Array, "D v"], b_v: Float[Array, "v"], labels_n: Int[Array, "n"],
    weight_n: Float[Array, "n"],
):
    """The same sums, and the loss's gradients to hidden, weights and bias."""
    def turn(total, part):
        more, errors = chunk_sums(axis, vocabulary, w_Dv, b_v, *part)
        errors = errors.astype(h_nD.dtype)
        product = partial(jnp.einsum, preferred_element_type=jnp.float32)
        more += product("nD,nv->Dv", part[0], errors), errors.sum(0)
        dh_nD = product("nv,Dv->nD", errors, w_Dv).astype(h_nD.dtype)
        return jax.tree.map(jnp.add, total, more), dh_nD

    parts = cut(chunk, h_nD, labels_n, weight_n)
    zero, float32 = jnp.zeros_like(weight_n[0]), jnp.float32
    start = zero, zero, *(jnp.zeros_like(x, float32) for x in (w_Dv, b_v))
    (loss, right, dw_Dv, db_v), dh_cnD = jax.lax.scan(turn, start, parts)
    dh_nD = dh_cnD.reshape(-1, h_nD.shape[-1])[:len(h_nD)]
    dw_Dv, db_v = dw_Dv.astype(w_Dv.dtype), db_v.astype(b_v.dtype)
    return (loss, right), (dh_nD, dw_Dv, db_v)


def cut(chunk: int, *tokens: Shaped[Array | np.ndarray, "n ..."]):
    """Arrays of n tokens as equal chunks of at most this size, then zeros."""
    n = len(tokens[0])
    chunks = -(-n // chunk)
    size = -(-n // chunks)
    more = lambda x: [(0, chunks * size - n)] + [(0, 0)] * (x.ndim - 1)
    return [jnp.pad(x, more(x)).reshape(chunks, size, *x.shape[1:]) for x in tokens]


def chunk_sums(
    axis: str | tuple[str, ...] | None, vocabulary: int, w_Dv: Float[Array, "D v"],
    b_v: Float[Array, "v"], h_nD: Float[Array, "n D"], labels_n: Int[Array, "n"],
    weight_n: Float[Array, "n"],
):
    """(loss, right answers) of one chunk, and its logits' gradients (n, v)."""
    v = len(b_v)
    first = 0 if axis is None else jax.lax.axis_index(axis) * v
    ids_v = first + jnp.arange(v)
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    logits_nv = product("nD,Dv->nv", h_nD, w_Dv)
    logits_nv = logits_nv + jnp.where(ids_v < vocabulary, b_v, MASKED)
    here_nv = labels_n[:, None] == ids_v
    top_n = logits_nv.max(-1)
    top_n = top_n if axis is None else jax.lax.pmax(top_n, axis)
    exp_nv = jnp.exp(logits_nv - top_n[:, None])
    label_n = jnp.where(here_nv, logits_nv, 0).sum(-1)
    sums = jnp.stack([exp_nv.sum(-1), label_n])
    total_n, label_n = sums if axis is None else jax.lax.psum(sums, axis)
    known_n = (labels_n >= 0) & (labels_n < vocabulary)
    loss_n = jnp.where(known_n, jnp.log(total_n) + top_n - label_n, jnp.nan)
    loss_n = jnp.where(weight_n != 0, loss_n * weight_n, 0)
    right_n = jnp.where(label_n >= top_n, weight_n, 0)
    # the gradient of the loss: each probability, less 1 at the label
    errors_nv = (exp_nv / total_n[:, None] - here_nv) * weight_n[:, None]
    return (loss_n.sum(), right_n.sum()), errors_nv


def token_losses(
    hidden: Float[Array | np.ndarray, "... D"], w_DV: Float[Array | np.ndarray, "D V"],
    b_V: Float[Array | np.ndarray, "V"], labels: Int[Array | np.ndarray, "..."],
):
    """The loss (nats) of each token, from all of its scores: (..., D) to (...)."""
    logits = hidden @ w_DV + b_V
    right = labels[..., None] == jnp.arange(len(b_V))
    label = jnp.where(right, logits, 0).sum(-1)
    return jax.nn.logsumexp(logits, -1) - label


def obvious_cross_entropy(
    hidden_BTD: Float[Array | np.ndarray, "B T D"], w_DV: Float[Array | np.ndarray, "D V"],
    b_V: Float[Array | np.ndarray, "V"], labels_BT: Int[Array | np.ndarray, "B T"],
    chunks: int = 16,
):
    """The mean loss in chunks as one writes it first: right, and not divided.

    Under Auto the axis of chunks falls on the axis that splits the batch:
    every chunk belongs to one data-parallel group, and all groups compute it.
    An Explicit mesh refuses it. See chapter 8.
    """
    @jax.checkpoint
    def total(hidden_nD, labels_n):
        return token_losses(hidden_nD, w_DV, b_V, labels_n).sum()

    D = hidden_BTD.shape[-1]
    parts = hidden_BTD.reshape(chunks, -1, D), labels_BT.reshape(chunks, -1)
    return jax.lax.map(lambda each: total(*each), parts).sum() / labels_BT.size
