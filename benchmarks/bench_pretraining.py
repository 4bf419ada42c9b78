"""The validation loss of the source's recipe and of this book's, at equal numbers of tokens.

The source's MiniGPT, at its own size, on the real stories of MESHBOOK_DATA, once through the
training set. The source: its initial weights, a story a row, filled up with token 0 to T and the
filling learned too, 256 rows a batch, Adam at a constant rate, no dropout. This book: full rows
cut from the stream, 16 a batch, `language_recipe`. Only tokens of stories are counted, so filling
is free; and both are asked for the same targets, of stories that stand at the start of a row.
"""

import itertools
import os
from dataclasses import replace

import jax
import numpy as np
import optax
from flax import nnx

from helpers import start
from meshbook.data import stories, tokens
from meshbook.models import MiniGPT, MiniGPTConfig
from meshbook.models.losses import language_loss
from meshbook.models.published import PublishedMiniGPT, gpt_weights
from meshbook.sharding import Sharding, make_mesh
from meshbook.training import create_state, evaluate, fit, language_recipe

CONFIG = MiniGPTConfig()
T, SOURCE_B, B, HELD, PEAK = CONFIG.tokens, 256, 16, 128, 2e-3


def texts(found):
    """The stories of a Tokens, each as a list of tokens that END closes."""
    rows = itertools.pairwise(found.starts)
    return [[*found.ids[a + 1:b].tolist(), int(found.ids[0])] for a, b in rows]


def filled(rows):
    """Rows of tokens as (R, T): cut at T, or filled up with token 0."""
    out = np.zeros((len(rows), T), np.int32)
    for at, row in enumerate(rows):
        out[at, :len(row[:T])] = row[:T]
    return out


def held_out(rows, first=()):
    """Batches of 16 stories behind the tokens `first`: targets are tokens 1 to T - 2 of each."""
    for at in range(0, len(rows), 16):
        inputs = filled([[*first, *row] for row in rows[at:at + 16]])
        weight = np.zeros(inputs.shape, np.float32)
        for line, row in zip(weight, rows[at:at + 16], strict=True):
            line[len(first):len(first) + min(len(row), T - 1) - 1] = 1
        yield {"inputs": inputs, "labels": np.roll(inputs, -1, axis=1), "weight": weight}


def state_of(config, optimizer):
    """A fresh run of this book's MiniGPT on two devices."""
    make = lambda: MiniGPT(config, Sharding.data_parallel(), rngs=nnx.Rngs(0))
    return create_state(make, optimizer, make_mesh((2, 1)), loss=language_loss)


def as_in_the_source(data):
    """[(tokens of stories, validation loss)] after each step of the source's recipe."""
    state = state_of(replace(CONFIG, dropout=0.0), optax.adam(1e-3))
    with nnx.use_eager_sharding(False):
        weights = gpt_weights(PublishedMiniGPT(CONFIG, rngs=nnx.Rngs(0)), CONFIG.padded)
    layouts = jax.tree.map(lambda x: x.sharding, state.params)
    state = replace(state, params=jax.device_put(weights, layouts))
    rows, held, seen, curve = texts(data.train), texts(data.validation)[:HELD], 0, []
    for at in range(0, len(rows) - SOURCE_B + 1, SOURCE_B):
        inputs = filled(rows[at:at + SOURCE_B])
        labels = np.concatenate([inputs[:, 1:], np.zeros((SOURCE_B, 1), np.int32)], axis=1)
        state, _ = fit(state, [{"inputs": inputs, "labels": labels}], jax.random.key(0))
        seen += sum(min(len(row), T) for row in rows[at:at + SOURCE_B])
        curve.append((seen, evaluate(state, held_out(held))["loss"]))
    return curve


def as_in_this_book(data, marks):
    """[(tokens, validation loss)] at the last step that has seen no more tokens than each mark."""
    steps = [mark // (B * T) for mark in marks]
    state = state_of(CONFIG, language_recipe(steps[-1], PEAK))
    held, end = texts(data.validation)[:HELD], data.encoding.eot_token
    stream, curve = tokens.batches(data.train, B, T, seed=0), []
    for before, step in itertools.pairwise([0, *steps]):
        state, _ = fit(state, itertools.islice(stream, step - before), jax.random.key(0))
        curve.append((step * B * T, evaluate(state, held_out(held, [end]))["loss"]))
    return curve


def run():
    """Both curves, where MESHBOOK_DATA has the real stories."""
    start(2)
    folder = os.environ.get("MESHBOOK_DATA")
    if not folder:
        return []
    data = stories.load_tinystories(folder)
    theirs = as_in_the_source(data)
    ours = as_in_this_book(data, [seen for seen, _ in theirs])
    return [
        {"name": f"validation loss after {mark:,} tokens", "unit": "nats a token", "value": loss,
         "note": f"this book, {seen:,} tokens; the source's recipe {their_loss:.3f}"}
        for (mark, their_loss), (seen, loss) in zip(theirs, ours, strict=True)]


if __name__ == "__main__":
    for row in run():
        print(row)
