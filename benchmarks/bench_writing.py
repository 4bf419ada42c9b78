"""Tokens a second: this book's `generate` beside the source's way, at the source's size.

The same weights in both, the same prompt, top-k 10. The source computes all 256 positions
eagerly for each token; several prompts it takes one after the other. Measured in turns.
"""

import dataclasses
import statistics
import time

import jax
import numpy as np
import optax
from flax import nnx

from helpers import start
from meshbook.models import MiniGPT, MiniGPTConfig, generate
from meshbook.models.published import PublishedMiniGPT, gpt_weights
from meshbook.sharding import Sharding
from meshbook.training import create_state

PROMPT = [7454, 2402, 257, 640]  # "Once upon a time" in GPT-2's vocabulary
LENGTH, SOURCE_LENGTH, ROUNDS = 200, 8, 5


def speed(write, tokens):
    """Tokens a second of one call."""
    begin = time.perf_counter()
    write()
    return tokens / (time.perf_counter() - begin)


def run():
    """Rows: tokens a second of each, and how many times the source's."""
    start(1)
    config = MiniGPTConfig()
    with nnx.use_eager_sharding(False):
        source = PublishedMiniGPT(config, rngs=nnx.Rngs(0))
    state = create_state(
        lambda: MiniGPT(config, Sharding.none(), rngs=nnx.Rngs(0)), optax.identity())
    weights = gpt_weights(source, config.padded)
    layouts = jax.tree.map(lambda x: x.sharding, state.params)
    state = dataclasses.replace(state, params=jax.device_put(weights, layouts))
    with jax.set_mesh(state.program.mesh):
        logits = state.program.apply(state.params, np.int32([PROMPT]))[..., :config.vocabulary]
    np.testing.assert_allclose(logits, source(np.int32([PROMPT])), atol=1e-4)

    def ours(rows):
        def write():
            generate(state, [PROMPT] * rows, LENGTH, jax.random.key(0), top_k=10)

        return speed(write, rows * LENGTH)

    theirs = lambda: speed(lambda: source.generate(SOURCE_LENGTH, PROMPT), SOURCE_LENGTH)
    ways = {"one prompt": lambda: ours(1), "sixteen prompts": lambda: ours(16),
            "the source's way": theirs}
    rounds = [{name: way() for name, way in ways.items()} for _ in range(ROUNDS + 1)][1:]
    rows = []
    for name, floor in ("one prompt", 40), ("sixteen prompts", 150), ("the source's way", 1):
        ratios = sorted(each[name] / each["the source's way"] for each in rounds)
        rows.append({
            "name": name, "value": statistics.median(each[name] for each in rounds),
            "unit": "tokens a second",
            "note": f"{statistics.median(ratios):.0f} times the source's (asked for: {floor}); "
                    f"rounds {ratios[0]:.0f} to {ratios[-1]:.0f}"})
    return rows


if __name__ == "__main__":
    for row in run():
        print(row)
