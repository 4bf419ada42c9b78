"""Both models, their losses and a step once more, for one device, as plainly as can be.

Nothing of the book's models is imported here: no sharding, no layers, no loss in chunks. So a run
that trains like this one (`proofs.assert_same_training`) trains like a program that shares no line
with it. Sizes are those of the parameters, nested dicts with the names that the models give them.

Sources: Dosovitskiy et al. 2021 (the vision transformer), the JAX AI stack's miniGPT tutorial.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int, Num

from meshbook.hlo.options import compiled_fast
from meshbook.proofs.same_training import Run


def vit(params: Mapping, images_BHWC: Num[Array | np.ndarray, "B H W C"],
        rate: int | float = 0.0, key: jax.Array | None = None):
    """The vision transformer's logits (B, C); with a key, dropout at this rate."""
    p = params
    B, side, _, colours = images_BHWC.shape
    pixels = round((p["w_patch_XD"].shape[0] / colours) ** 0.5)
    patches = []
    for top in range(0, side, pixels):
        for left in range(0, side, pixels):
            patch = images_BHWC[:, top:top + pixels, left:left + pixels]
            patches.append(patch.reshape(B, -1) @ p["w_patch_XD"] + p["b_patch_D"])
    first_BD = jnp.broadcast_to(p["class_D"], (B, len(p["class_D"])))
    x_BTD = jnp.stack([first_BD, *patches], 1) + p["position_TD"]
    keys = folded(key, len(p["blocks"]))
    for number, key in enumerate(keys):
        block = p["blocks"][str(number)]
        x_BTD = x_BTD + attend(block["attention"], layer_norm(block["norm1"], x_BTD))
        mlp, keys = block["mlp"], folded(key, 2)
        h_BTF = layer_norm(block["norm2"], x_BTD) @ mlp["w_in_DF"] + mlp["b_in_F"]
        h_BTF = dropped(jax.nn.gelu(h_BTF), rate, keys[0])
        x_BTD = x_BTD + dropped(h_BTF @ mlp["w_out_FD"] + mlp["b_out_D"], rate, keys[1])
    return layer_norm(p["norm"], x_BTD[:, 0]) @ p["w_head_DC"] + p["b_head_C"]


def minigpt(
    params: Mapping, tokens_BT: Int[Array | np.ndarray, "B T"],
    rate: int | float = 0.0, key: jax.Array | None = None,
    segments: Int[Array | np.ndarray, "B T"] | None = None,
    positions: Int[Array | np.ndarray, "B T"] | None = None,
):
    """The language model's logits (B, T, V), V padded; with a key, dropout at this rate."""
    p, T = params, tokens_BT.shape[1]
    at_BT = jnp.arange(T) if positions is None else positions
    x_BTD = p["token_VD"][tokens_BT] + p["position_TD"][at_BT]
    seen = jnp.arange(T)[:, None] >= jnp.arange(T)
    if segments is not None:
        seen = seen & (segments[:, None, :, None] == segments[:, None, None, :])
    for number, key in enumerate(folded(key, len(p["blocks"]))):
        block, keys = p["blocks"][str(number)], folded(key, 2)
        y_BTD = attend(block["attention"], x_BTD, seen)
        x_BTD = layer_norm(block["norm1"], x_BTD + dropped(y_BTD, rate, keys[0]))
        mlp = block["mlp"]
        h_BTF = jnp.maximum(x_BTD @ mlp["w_in_DF"] + mlp["b_in_F"], 0)
        y_BTD = h_BTF @ mlp["w_out_FD"] + mlp["b_out_D"]
        x_BTD = layer_norm(block["norm2"], x_BTD + dropped(y_BTD, rate, keys[1]))
    return x_BTD @ p["w_head_DV"] + p["b_head_V"]


def write(params: Mapping, prompts: Sequence[Sequence[int]], length: int, key: jax.Array,
          window: int, classes: int, temperature: int | float = 1.0, top_k: int | None = None,
          top_p: int | float | None = None):
    """Continue each prompt by `length` tokens, the whole window again for each: lists of tokens.

    Token n of row r is drawn with the r-th uniform number of the key into which n is folded. A text
    that outgrows the window is read from the least multiple of half the window from which it fits.
    temperature, top_k, top_p: as in `meshbook.models.generation`.
    """
    params = jax.tree.map(jnp.asarray, params)
    last = jax.jit(lambda tokens, at: minigpt(params, tokens)[0, at, :classes])
    texts = [list(prompt) for prompt in prompts]
    for n in range(length):
        chances = jax.random.uniform(jax.random.fold_in(key, n), (len(texts),))
        for text, chance in zip(texts, chances.tolist()):
            start = 0
            while len(text) - start > window:
                start += window // 2
            seen = text[start:]
            tokens = np.array([seen + [0] * (window - len(seen))], np.int32)
            logits = np.asarray(last(tokens, len(seen) - 1), np.float64)
            text.append(sampled(logits, chance, temperature, top_k, top_p))
    return [text[-length:] for text in texts]


def sampled(logits: Float[np.ndarray, "V"], chance: float | np.floating,
            temperature: int | float, top_k: int | None, top_p: int | float | None) -> int:
    """The token in whose share of the probabilities the chance falls; temperature 0: the first.

    With top_k shares are in the order of probability, otherwise in that of the tokens.
    """
    ids = np.argsort(-logits, kind="stable")[:top_k]
    if temperature == 0:
        return int(ids[0])
    p = np.exp((logits[ids] - logits[ids[0]]) / temperature)
    p /= p.sum()
    if top_p is not None:
        kept = np.searchsorted(np.cumsum(p), top_p) + 1
        ids, p = ids[:kept], p[:kept]
    order = slice(None) if top_k else np.argsort(ids)
    ids, sums = ids[order], np.cumsum(p[order])
    return int(ids[min((sums <= chance * sums[-1]).sum(), len(ids) - 1)])


def attend(p: Mapping, x_BTD: Float[Array | np.ndarray, "B T D"],
           seen: Bool[Array | np.ndarray, "..."] | None = None):
    """Attention in H heads, each written out; seen: which token looks at which."""
    q, k, v = (jnp.einsum("btd,dhk->bhtk", x_BTD, p["w_qkv_DSHK"][:, s])
               + p["b_qkv_SHK"][s][:, None] for s in range(3))
    scores = jnp.einsum("bhtk,bhsk->bhts", q, k) / q.shape[-1] ** 0.5
    if seen is not None:
        scores = jnp.where(seen, scores, -jnp.inf)
    y = jnp.einsum("bhts,bhsk->bthk", jax.nn.softmax(scores, -1), v)
    return jnp.einsum("bthk,hkd->btd", y, p["w_out_HKD"]) + p["b_out_D"]


def layer_norm(p: Mapping, x_BTD: Float[Array | np.ndarray, "... D"]):
    """Layer normalisation over D."""
    mean, var = x_BTD.mean(-1, keepdims=True), x_BTD.var(-1, keepdims=True)
    return (x_BTD - mean) / jnp.sqrt(var + 1e-6) * p["scale_D"] + p["bias_D"]


def folded(key: jax.Array | None, places: int) -> list:
    """A key for each place, or none."""
    return [key if key is None else jax.random.fold_in(key, at) for at in range(places)]


def dropped(x: Float[Array | np.ndarray, "..."], rate: int | float, key: jax.Array | None):
    """x with a share of its elements 0 and the rest scaled up; without a key, x.

    Of 256 equally likely numbers, some drop an element. A random word of 32 bits has four of them,
    from its lowest on, for four rows that lie a quarter of the rows apart.
    """
    if key is None or rate == 0:
        return x
    some, (B, T, D) = round(rate * 256), x.shape
    quarter = (T + 3) // 4
    words = jax.random.bits(key, (B, quarter, D))
    drawn = jnp.stack([words // 256**n % 256 for n in range(4)], 1).reshape(B, 4 * quarter, D)
    return jnp.where(drawn[:, :T] < some, 0, x / (1 - some / 256))


def cross_entropy(
    logits: Float[Array | np.ndarray, "*N V"], labels: Int[Array | np.ndarray, "*N"],
    weight: Num[Array | np.ndarray, "..."] | None = None, classes: int | None = None,
):
    """Mean loss in nats and accuracy over all labels, or over those that count.

    classes: how many of the logits are classes; the others are filling.
    """
    logits = logits[..., :classes]
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]
    right = logits.argmax(-1) == labels
    weight = jnp.ones(labels.shape) if weight is None else weight
    mean = lambda x: (x * weight).sum() / weight.sum()
    return mean(losses), mean(right)


def adamw(steps: int, peak: int | float):
    """AdamW with the book's settings, written out.

    The rate rises to peak in a tenth of the steps and falls along half a cosine to 0. Weights,
    tokens and positions decay, biases and norms do not. Source: Loshchilov and Hutter 2019.
    """
    warm, b1, b2, decay = steps // 10, 0.9, 0.99, 0.05

    def rate(n):
        fall = 0.5 * (1 + jnp.cos(jnp.pi * (n - warm) / (steps - warm)))
        return peak * jnp.where(n < warm, n / max(warm, 1), fall)

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return jnp.int32(0), zeros, zeros

    def update(gradients, state, params):
        n, means, squares = state
        means = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, means, gradients)
        squares = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, squares, gradients)

        def change(path, m, v, p):
            m, v = m / (1 - b1 ** (n + 1)), v / (1 - b2 ** (n + 1))
            weight = path[-1].key.startswith(("w_", "token_", "position_"))
            return -rate(n) * (m / (jnp.sqrt(v) + 1e-8) + weight * decay * p)

        changes = jax.tree_util.tree_map_with_path(change, means, squares, params)
        return changes, (n + 1, means, squares)

    return optax.GradientTransformation(init, update)


def global_norm(tree: Any):
    """The norm of all elements of all leaves."""
    return jnp.sqrt(sum(jnp.sum(x * x) for x in jax.tree.leaves(tree)))


@dataclasses.dataclass(frozen=True)
class Reference:
    """Training on one device with plain optax: one side of `proofs.assert_same_training`.

    model: `vit` or `minigpt`. params: where it starts, on the host. prepare(inputs, key): what
    becomes of inputs before the model sees them. rate: of dropout. classes: as in `cross_entropy`.
    clip: gradients of a norm above it are cut to it, before the optimizer and a proof see them.
    The keys of step n are made as the book documents it: fold n into the run's key, split that in
    two, for the preparation and for dropout.
    """

    model: Callable
    params: dict
    optimizer: optax.GradientTransformation | None
    key: jax.Array
    prepare: Callable = lambda inputs, key: inputs
    rate: float = 0.0
    classes: int | None = None
    clip: float = jnp.inf

    @property
    def state(self):
        """(step number, parameters, optimizer's state) at the start."""
        params = jax.tree.map(jnp.asarray, self.params)
        return jnp.int32(0), params, self.optimizer.init(params)

    def loss(self, params: Any, batch: Mapping[str, Array | np.ndarray],
             keys: tuple | jax.Array = (None, None)):
        """(loss, accuracy) of one batch; without keys, evaluation."""
        documents = {name: batch[name] for name in ("segments", "positions") if name in batch}
        inputs = self.prepare(batch["inputs"], keys[0])
        logits = self.model(params, inputs, self.rate, keys[1], **documents)
        return cross_entropy(logits, batch["labels"], batch.get("weight"), self.classes)

    def value_and_gradients(self, state: tuple, batch: Mapping[str, Array | np.ndarray]):
        """((loss, accuracy), gradients) of the step that this state is about to take."""
        number, params, _ = state
        keys = jax.random.split(jax.random.fold_in(self.key, number))
        return jax.value_and_grad(self.loss, has_aux=True)(params, batch, keys)

    def run(self, params: bool = True):
        """The proofs.Run of it; params: whether parameters are compared, as under SGD."""
        step = jax.jit(self.step, compiler_options=compiled_fast())
        return Run(lambda state, batch: step(state, batch)[:2], self.state,
                   lambda state, batch: step(state, batch)[2],
                   (lambda state: state[1]) if params else None)

    def step(self, state: tuple, batch: Mapping[str, Array | np.ndarray]):
        """(new state, metrics, gradients); their norm before clipping is among the metrics."""
        number, params, moments = state
        keys = jax.random.split(jax.random.fold_in(self.key, number))
        of_loss = jax.value_and_grad(self.loss, has_aux=True)
        (loss, accuracy), gradients = of_loss(params, batch, keys)
        norm = global_norm(gradients)
        gradients = jax.tree.map(lambda g: g * jnp.minimum(1, self.clip / norm), gradients)
        updates, moments = self.optimizer.update(gradients, moments, params)
        params = jax.tree.map(jnp.add, params, updates)
        metrics = {"loss": loss, "accuracy": accuracy, "gradient_norm": norm}
        return (number + 1, params, moments), metrics, gradients


def assert_initial(params: Any, bounds: Mapping[str, int | float]):
    """Assert that parameters start as they should: uniform up to a bound, or at 0 or 1.

    params: nested dicts; bounds: {letters: bound}, by the letters that a name ends in. Names that
    begin with scale_ start at 1, and where no bound is known all start at 0. No two are drawn
    alike.
    """
    drawn_before = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        x, name = np.asarray(leaf), path[-1].key
        bound = bounds.get(name.rpartition("_")[2])
        if name.startswith("b_") or bound is None:
            expected = float(name.startswith("scale_"))
            assert np.all(x == expected), f"{name}: expected {expected}, found {x.ravel()[:3]}"
            continue
        assert x.tobytes() not in drawn_before, f"{name}: expected elements of its own"
        drawn_before.add(x.tobytes())
        largest, mean, error = np.abs(x).max(), x.mean(), bound / (3 * x.size) ** 0.5
        assert 0.9 * bound < largest <= bound, f"{name}: expected up to {bound}, found {largest}"
        assert abs(mean) < 5 * error, f"{name}: expected a mean of 0, found {mean}"
        spread = x.std() * 3**0.5 / bound
        assert 0.8 < spread < 1.2, f"{name}: expected a uniform distribution, found {spread:.2f}"
