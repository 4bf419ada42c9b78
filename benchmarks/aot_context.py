"""Find the longest row that a decoder can be trained with on a TPU v5e: results/tpu-context.json.

    .venv-aot/bin/python -m benchmarks.aot_context               all of these
    .venv-aot/bin/python -m benchmarks.aot_context ring gather   those with one of these words

For each way of splitting tokens, a step with one row is compiled with twice as many tokens until it
does not fit. What was found before is kept.
"""

import json
import logging
import os
import sys
from functools import partial

os.environ["JAX_PLATFORMS"] = "cpu"  # libtpu compiles, and is no device

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec as P  # noqa: E402

from benchmarks.__main__ import ROOT  # noqa: E402
from meshbook.models.decoder import Decoder, DecoderConfig  # noqa: E402
from meshbook.models.losses import chunked_cross_entropy, language_loss  # noqa: E402
from meshbook.parallel.context import Context, zigzag  # noqa: E402
from meshbook.planning import topologies  # noqa: E402
from meshbook.sharding import Sharding  # noqa: E402
from meshbook.training import abstract_state, as_it_is, train_step  # noqa: E402

TPU, RESULTS, CACHE = "v5e-8", ROOT / "results" / "tpu-context.json", ROOT / "_build" / "aot"
WAYS = {  # how attention is done, on how many devices, and with how many tokens it begins
    "all scores, 1": (None, 1, 2**12),
    "blocks, 1": (Context(), 1, 2**16),
    "gather, 8": (Context("gather", zigzagged=True), 8, 2**19),
    "ring, 8": (Context("ring", zigzagged=True), 8, 2**19),
    "ulysses, 8": (Context("ulysses"), 8, 2**19),
}


def in_order(context, params, program, batch, key=None):
    """The chunked loss of a batch, in zigzag order where the context asks for it."""
    if context and context.zigzagged:
        batch = zigzag(batch, program.mesh.shape[context.axis])
    chunked = partial(chunked_cross_entropy, chunk=2048)
    return language_loss(params, program, batch, key, cross_entropy=chunked)


def compiled(context, ways, tokens):
    """A Compilation of a step with one row of so many tokens."""
    mesh = topologies.tpu_mesh(TPU, (1, ways), ("batch", "context"))
    rules = Sharding.context_parallel(context) if context else Sharding.data_parallel()
    config = DecoderConfig(
        vocabulary=50_257, tokens=tokens, embed=1024, hidden=4096, heads=16, groups=8, layers=12,
        gated=False, remat="attention", dtype=jnp.bfloat16)
    state = abstract_state(lambda: Decoder(config, rules, rngs=nnx.Rngs(0)),
                           optax.adamw(6e-4, weight_decay=0.1), mesh, as_it_is,
                           partial(in_order, context))
    ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32, sharding=NamedSharding(mesh, P("batch")))
    return topologies.compile_for(TPU, train_step, state, {"inputs": ids, "labels": ids},
                                  jax.eval_shape(lambda: jax.random.key(0)), cache=CACHE)


def main(words):
    jax.config.update("jax_traceback_in_locations_limit", 0)
    logging.getLogger("jax").setLevel(logging.ERROR)
    record = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name, (context, ways, tokens) in WAYS.items():
        if words and not any(word in name for word in words):
            continue
        fits = True
        while fits:
            found = compiled(context, ways, tokens)
            fits, record[f"{name}, {tokens}"] = found.fits, found.record()
            print(f"{name}, {tokens:,} tokens: {found.peak / 2**30:.2f} GiB, "
                  f"{'fits' if fits else 'does not fit'}, {found.seconds} s", flush=True)
            topologies.write_json(RESULTS, record)
            tokens *= 2


if __name__ == "__main__":
    main(sys.argv[1:])
