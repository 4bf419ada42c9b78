"""How a language model writes: what it read is kept, and the next token is drawn by chance.

A model has `empty_cache(rows)`, `extend(tokens, cache, column, first)` and `head(hidden)`, and a
config with `vocabulary` and `tokens`, as `MiniGPT` and `Decoder` do.

A text that outgrows the window slides: the window begins at the smallest multiple of half
its size from which the text fits, and what it then holds is read again. So the tokens
that the model sees depend on the length of the text alone, not on how it came about.
"""
from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from meshbook.data.order import process_share
from meshbook.models.text_models import TextSizes
from meshbook.sharding import row_groups, whole
from meshbook.training.state import Program, TrainState


def generate(
    state: TrainState, prompts: Sequence[Sequence[int]], length: int,
    key: jax.Array, **choice: Any,
):
    """Continue every prompt by up to `length` tokens: a list of new ones each.

    state: of a run (params and program). prompts: lists of tokens, of any
    lengths. key: of all random choices; the same key writes the same on every
    mesh. choice: temperature, top_k, top_p and stop, as `stream` has them.
    """
    written = [[] for _ in prompts]
    piece = config_of(state.program).tokens
    for new in stream(state, prompts, length, key, piece=piece, **choice):
        for row, tokens in zip(written, new):
            row += tokens
    return written


def stream(
    state: TrainState, prompts: Sequence[Sequence[int]], length: int,
    key: jax.Array, *, temperature: int | float = 1.0,
    top_k: int | None = None, top_p: int | float | None = None,
    stop: int | None = None, piece: int = 1,
):
    """The same piece by piece: yields each row's tokens of a few steps.

    temperature: 0 takes the likeliest token, 1 draws as likely as the model
    says. top_k: among so many of the likeliest; top_p: among the fewest that
    together have this chance. stop: the token that ends a row; it is not part
    of what is written. piece: steps between two yields. Raises ValueError for
    what does not fit.
    """
    program, params = state.program, state.params
    config = config_of(program)
    check(config, prompts, length, temperature, top_k, top_p, piece)
    ways = program.ways
    texts = [list(prompt) for prompt in prompts]
    alive = [True] * len(texts) + [False] * (-len(texts) % ways)
    texts += [[0]] * (-len(texts) % ways)  # rows that make the batch divide
    chances = np.float32(temperature), np.float32(1 if top_p is None else top_p)
    column, done = config.tokens + 1, 0
    while done < length and any(alive):
        if column > config.tokens:
            tokens_BT, first_B, column = laid_out(texts, alive, config.tokens)
            ours = process_share(len(texts), *row_groups(program.mesh, program.rows))
            where = program.place({"tokens": tokens_BT[ours], "first": first_B[ours]})
            with jax.set_mesh(program.mesh):
                memory = prefill(program, params, **where, column=column)
        steps = min(piece, length - done, config.tokens + 1 - column)
        with jax.set_mesh(program.mesh):
            written_BT, memory = decode(
                program, top_k, top_p is not None, params, memory,
                where["first"], np.array(alive), column, done, steps,
                -1 if stop is None else stop, key, *chances,
            )
        new = [row[:steps] for row in whole(written_BT).tolist()]
        for at, row in enumerate(new):
            ends = stop in row
            new[at] = row[:row.index(stop)] if ends else row
            new[at] = new[at] if alive[at] else []
            alive[at] = alive[at] and not ends
            texts[at] = texts[at] + new[at]
        column, done = column + steps, done + steps
        yield new[:len(prompts)]


def config_of(program: Program) -> TextSizes:
    """The sizes of a program's model; no array is looked at."""
    return nnx.merge(program.graph, program.variables).config


def as_text(pieces: Iterable, encoding: Any):
    """The text of what `stream` yields for one prompt, a piece at a time.

    Bytes of a character whose other bytes are still to come are held back.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for (tokens,) in pieces:
        yield decoder.decode(encoding.decode_bytes(tokens))
    yield decoder.decode(b"", final=True)


def check(
    config: TextSizes, prompts: Sequence[Sequence[int]], length: int,
    temperature: int | float, top_k: int | None, top_p: int | float | None,
    piece: int,
):
    """ValueError where a wish cannot be met."""
    if not prompts:
        raise ValueError("there is nothing to continue: prompts is empty")
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(
                f"prompt {number} is empty; it needs at least one token"
            )
        strange = [t for t in prompt if not 0 <= t < config.vocabulary]
        if strange:
            raise ValueError(
                f"prompt {number} has token {strange[0]}; the vocabulary goes "
                f"from 0 to {config.vocabulary - 1}"
            )
    wishes = [
        ("length", "a number from 0", length, length >= 0),
        ("temperature", "a number from 0", temperature, temperature >= 0),
        ("top_k", f"from 1 to {config.vocabulary}, or None", top_k,
         top_k is None or 1 <= top_k <= config.vocabulary),
        ("top_p", "above 0 and at most 1, or None", top_p,
         top_p is None or 0 < top_p <= 1),
        ("piece", "a number from 1", piece, piece >= 1),
    ]
    for name, expected, found, fits in wishes:
        if not fits:
            raise ValueError(f"{name} is {expected}; found {found}")


def window_start(length: int, window: int) -> int:
    """Where the window begins in a text of this length."""
    half = max(window // 2, 1)
    return max(-(-(length - window) // half) * half, 0)


def laid_out(
    texts: Sequence[Sequence[int]], alive: Sequence[bool], window: int
):
    """What each row sees, last tokens in one column: (tokens (B, W), first, next).

    Rows that have ended are given one token, so that the others have room.
    """
    seen = [text[window_start(len(text), window):] if lives else text[-1:]
            for text, lives in zip(texts, alive)]
    longest = max(map(len, seen))
    first_B = np.array([longest - len(text) for text in seen], np.int32)
    tokens_BW = np.zeros((len(seen), window), np.int32)
    for row, first, text in zip(tokens_BW, first_B, seen):
        row[first:longest] = text
    return tokens_BW, first_B, longest


@partial(jax.jit, static_argnums=0)
def prefill(
    program: Program, params: Any, tokens: Int[Array | np.ndarray, "B W"],
    first: Int[Array | np.ndarray, "B"], column: int | Array,
):
    """The cache of all layers, and the last column's logits (B, V)."""
    model = program.model(params)
    rows = model.sharding.activation("B")
    tokens_BT, first_B = jax.reshard(tokens, rows), jax.reshard(first, rows)
    cache = model.empty_cache(len(tokens))
    x_BTD, cache = model.extend(tokens_BT, cache, 0, first_B)
    last = jax.lax.dynamic_slice_in_dim(x_BTD, column - 1, 1, axis=1)
    return cache, logits(model, last)


def logits(model: nnx.Module, x_BTD: Float[Array, "B T D"]):
    """Logits (B, V) of one column in float32, whole along "model"."""
    logits_BV = model.head(x_BTD)[:, 0].astype(jnp.float32)
    return jax.reshard(logits_BV, model.sharding.activation("BD"))


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def decode(
    program: Program, top_k: int | None, nucleus: bool, params: Any,
    memory: tuple, first: Int[Array | np.ndarray, "B"],
    alive: Bool[Array | np.ndarray, "B"], column: int | Array,
    done: int | Array, steps: int | Array, stop: int | Array, key: jax.Array,
    temperature: float | Array, top_p: float | Array,
):
    """Draw a token, put it into its column, and on: (tokens (B, W), memory).

    Ends after `steps`, or when no row is alive. nucleus: whether top_p is
    asked for.
    """
    model = program.model(params)
    split, rows = model.sharding.activation("B"), len(first)
    first_B = jax.reshard(first, split)

    def goes_on(carry):
        step, alive_B, *_ = carry
        return (step < steps) & alive_B.any()

    def turn(carry):
        step, alive_B, written_BW, cache, logits_BV = carry
        now = jax.random.fold_in(key, done + step)
        chance_B = jax.reshard(jax.random.uniform(now, (rows,)), split)
        token_B = draw(
            logits_BV, chance_B, temperature, top_p, top_k, nucleus
        )
        written_BW = jax.lax.dynamic_update_slice_in_dim(
            written_BW, token_B[:, None], step, axis=1
        )
        x_BTD, cache = model.extend(
            token_B[:, None], cache, column + step, first_B
        )
        alive_B = alive_B & (token_B != stop)
        return step + 1, alive_B, written_BW, cache, logits(model, x_BTD)

    written_BW = jnp.zeros((rows, model.config.tokens), jnp.int32)
    start = 0, jax.reshard(alive, split), jax.reshard(written_BW, split), *memory
    _, _, written_BW, *memory = jax.lax.while_loop(goes_on, turn, start)
    return written_BW, tuple(memory)


def draw(
    logits_BV: Float[Array | np.ndarray, "B V"],
    chance_B: Float[Array | np.ndarray, "B"], temperature: int | float | Array,
    top_p: int | float | Array, top_k: int | None = None, nucleus: bool = False,
):
    """A token of each row: in its share of the chances falls chance_B.

    chance_B: uniform in [0, 1). temperature 0: the likeliest token.
    """
    likely_BV, ids_BV = jax.lax.top_k(logits_BV, top_k or 1)
    likely_BV = likely_BV if top_k else logits_BV  # all, in their own order
    divisor = jnp.where(temperature > 0, temperature, 1)
    p_BV = jax.nn.softmax(likely_BV / divisor)
    if nucleus:
        p_BV = jnp.where(p_BV >= least_likely(p_BV, top_p), p_BV, 0)
    sum_BV = jnp.cumsum(p_BV, -1)
    total_B1 = sum_BV[:, -1:]
    at_B = (sum_BV <= chance_B[:, None] * total_B1).sum(-1)
    last_B = (sum_BV < total_B1).sum(-1)  # rounding can carry past it
    at_B = jnp.minimum(at_B, last_B).astype(jnp.int32)
    if not top_k:
        return jnp.where(temperature > 0, at_B, ids_BV[:, 0])
    at_B = jnp.where(temperature > 0, at_B, 0)  # a slice makes XLA sort all
    return jnp.take_along_axis(ids_BV, at_B[:, None], -1)[:, 0]


def least_likely(
    p_BV: Float[Array | np.ndarray, "B V"], top_p: int | float | Array
):
    """The largest chance whose tokens, and those above, have top_p together: (B, 1).

    Found by halving, bit by bit, and not by sorting the vocabulary: floats from
    0 on are ordered like their bits.
    """
    bits_BV = jax.lax.bitcast_convert_type(p_BV, jnp.int32)

    def halve(_, bounds):
        low_B1, high_B1 = bounds
        middle_B1 = low_B1 + (high_B1 - low_B1 + 1) // 2
        kept_BV = jnp.where(bits_BV >= middle_B1, p_BV, 0)
        enough_B1 = kept_BV.sum(-1, keepdims=True) >= top_p
        return (jnp.where(enough_B1, middle_B1, low_B1),
                jnp.where(enough_B1, high_B1, middle_B1 - 1))

    high_B1 = bits_BV.max(-1, keepdims=True)
    found, _ = jax.lax.fori_loop(0, 31, halve, (0 * high_B1, high_B1))
    return jax.lax.bitcast_convert_type(found, jnp.float32)
