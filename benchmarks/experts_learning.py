"""A decoder with experts against a dense one with as many parameters for a token: three seeds.

    python -m benchmarks.experts_learning

Both see the same batches of the grammar's stories in the same order, under the book's optimizer, on
one device. A token uses as many parameters in one as in the other, or a little fewer where there
are experts; experts make the model larger, not its work. Each is trained with each of PEAKS and
each of SEEDS, and the peak whose mean over seeds is lower counts. What is recorded is in
results/experts_learning.json.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import jax
from flax import nnx

from benchmarks import tinystories
from benchmarks.__main__ import machine, provenance
from benchmarks.decoder_learning import load, train
from helpers import start
from meshbook.models.balanced_loss import balanced_loss
from meshbook.models.decoder import Decoder, DecoderConfig
from meshbook.models.expert_layers import ExpertSizes
from meshbook.models.losses import language_loss
from meshbook.planning.decoder_costs import decoder_parameters
from meshbook.planning.expert_costs import expert_decoder_parameters
from meshbook.planning.topologies import RESULTS
from meshbook.sharding import Sharding
from meshbook.training import language_recipe

RECORD = RESULTS / "experts_learning.json"
SEEDS, PEAKS, ROWS, STEPS = (0, 1, 2), (3e-3, 1e-2), 16, 400
MOST_APART = 0.02  # by how much a token may use fewer parameters where there are experts
SHARED = dict(tokens=128, embed=48, heads=4, layers=2)
SIZES = {"dense": dict(hidden=24),
         "experts": dict(hidden=10, experts=ExpertSizes(8, 2, auxiliary=0.01))}


def config_of(name, vocabulary):
    """The sizes of a model."""
    return DecoderConfig(vocabulary, **SHARED, **SIZES[name])


def used(config):
    """How many parameters one token uses."""
    if config.experts is None:
        return decoder_parameters(config)
    return expert_decoder_parameters(config, active=True)


def check(vocabulary):
    """ValueError unless a token uses as many parameters with experts, or a little fewer."""
    dense, ours = (used(config_of(name, vocabulary)) for name in SIZES)
    if not 0 <= dense - ours <= MOST_APART * dense:
        raise ValueError(f"a token uses {ours:,} parameters with experts; expected at most the "
                         f"dense decoder's {dense:,}, and at most {MOST_APART:.0%} fewer")


def one_run(name, data, steps, peak, seed):
    """[(step, validation loss)] of one model, learning rate and seed."""
    config = config_of(name, data.encoding.n_vocab)
    loss = language_loss if config.experts is None else balanced_loss
    make = lambda: Decoder(config, Sharding.none(), rngs=nnx.Rngs(seed))
    state, _, looks = train(make, data, ROWS, steps, language_recipe(steps, peak), loss, seed)
    whole = sum(x.size for x in jax.tree.leaves(state.params))
    return whole, [[step, round(each, 4)] for step, each in looks]


def compared(data, steps, seeds, peaks):
    """The record of both models."""
    check(data.encoding.n_vocab)
    models = {}
    for name in SIZES:
        runs = {}
        for peak in peaks:
            for seed in seeds:
                print(f"{name}, peak {peak}, seed {seed}", flush=True)
                whole, looks = one_run(name, data, steps, peak, seed)
                runs.setdefault(peak, []).append(looks)
        finals = {peak: [looks[-1][1] for looks in each] for peak, each in runs.items()}
        best = min(finals, key=lambda peak: statistics.mean(finals[peak]))
        models[name] = {
            "parameters": whole, "used": used(config_of(name, data.encoding.n_vocab)),
            "peak": best, "finals": [[peak, losses] for peak, losses in finals.items()],
            "looks": runs[best]}
    return {"source": data.source, "vocabulary": data.encoding.n_vocab, "rows": ROWS,
            "steps": steps, "tokens": steps * ROWS * SHARED["tokens"], "seeds": list(seeds),
            "models": models}


def main(arguments=None):
    """Train, compare, and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--peaks", type=float, nargs="+", default=PEAKS)
    parser.add_argument("--record", type=Path, default=RECORD)
    asked = parser.parse_args(arguments)
    start(1)
    command, begin = " ".join(["python -m benchmarks.experts_learning",
                               *(arguments or sys.argv[1:])]), time.time()
    found = compared(load("grammar"), asked.steps, asked.seeds, asked.peaks)
    record = {"provenance": provenance(command), "machine": machine(),
              "seconds": round(time.time() - begin), **found}
    tinystories.write(record, asked.record)
    for name, model in found["models"].items():
        print(name, json.dumps(model["finals"]), f"{model['used']:,} of {model['parameters']:,}")


if __name__ == "__main__":
    main()
