"""A layer of experts without any dispatch: every expert computes every token, gates weigh them.

Choices are made in NumPy, with loops. Nothing of the package is here.
"""
import jax
import jax.numpy as jnp
import numpy as np


def scores_of(logits, kind):
    """Scores of each expert, from logits."""
    return jax.nn.softmax(logits) if kind == "softmax" else 1 / (1 + jnp.exp(-logits))


def choices_of(scores, active, capacity):
    """(numbers of each token's best experts, whether each choice has one of the row's slots)."""
    experts = np.argsort(-np.asarray(scores), -1, kind="stable")[..., :active].astype(np.int32)
    kept = np.ones(experts.shape, bool)
    for row in range(len(experts)):
        taken = dict.fromkeys(range(scores.shape[-1]), 0)
        for t, a in np.ndindex(experts.shape[1:]):
            expert = experts[row, t, a]
            kept[row, t, a] = capacity is None or taken[expert] < capacity
            taken[expert] += 1
    return experts, kept


def one_mlp(weights, number, x):
    """Expert `number` of all tokens."""
    h = jnp.einsum("btd,dsf->btsf", x, weights["EDSF"][number])
    h = h + weights["ESF"][number] if "ESF" in weights else h
    a = jax.nn.silu(h[:, :, 0]) * h[:, :, 1] if h.shape[2] == 2 else jax.nn.gelu(h[:, :, 0])
    y = a @ weights["EFD"][number]
    return y + weights["ED"][number] if "ED" in weights else y


def layer(weights, router, x, active, capacity, kind="softmax"):
    """(what the experts make of x (B, T, D), the balance loss, counts before and after dropping)."""
    count = router.shape[1]
    scores = scores_of(x @ router, kind)
    shape = *x.shape[:2], active
    types = jax.ShapeDtypeStruct(shape, np.int32), jax.ShapeDtypeStruct(shape, bool)
    experts, kept = jax.pure_callback(
        lambda scores: choices_of(scores, active, capacity), types, jax.lax.stop_gradient(scores))
    gates = jnp.take_along_axis(scores, experts, -1)
    gates = gates / gates.sum(-1, keepdims=True) if active > 1 else gates
    y = 0
    for number in range(count):
        gate = jnp.where((experts == number) & kept, gates, 0).sum(-1)
        y = y + gate[..., None] * one_mlp(weights, number, x)
    shares = scores / scores.sum(-1, keepdims=True)
    before = jnp.bincount(experts.ravel(), length=count)
    after = jnp.bincount(jnp.where(kept, experts, count).ravel(), length=count)
    balance = count * (before / experts.size * shares.mean((0, 1))).sum()
    return y, balance, before, after
