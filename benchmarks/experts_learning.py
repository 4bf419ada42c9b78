"""A decoder with experts against a dense one with as many parameters for a token: three seeds.

    python -m benchmarks.experts_learning grammar                           half an hour and more
    MESHBOOK_DATA=DIR python -m benchmarks.experts_learning tinystories     an hour and more
    MESHBOOK_DATA=DIR python -m benchmarks.experts_learning --jobs 12       both on one GPU: minutes

Both see the same batches of stories in the same order, under the book's optimizer, on one device. A
token uses as many parameters in one as in the other, or a little fewer where there are experts;
experts make the model larger, not its work. Each is trained with each of its plan's peaks and each
of SEEDS, each run in a process of its own, and the peak whose mean over seeds is lower counts. TinyStories
are read with a vocabulary learned from them. What is recorded is in results/experts_learning.json.
"""

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax
from flax import nnx

from benchmarks import tinystories
from benchmarks.__main__ import machine, provenance
from benchmarks.decoder_learning import load, train
from helpers import start
from meshbook.costs import plans
from meshbook.costs.step import describe
from meshbook.models.balanced_loss import balanced_loss
from meshbook.models.decoder import Decoder, DecoderConfig
from meshbook.models.expert_layers import ExpertSizes
from meshbook.models.losses import language_loss
from meshbook.planning.topologies import RESULTS
from meshbook.sharding import Sharding
from meshbook.training import language_recipe

RECORD = RESULTS / "experts_learning.json"
SEEDS = 0, 1, 2
MOST_APART = 0.02  # by how much a token may use fewer parameters where there are experts

class Plan(NamedTuple):
    """What is trained on a corpus: both decoders' sizes but for their hidden units, and these.

    dense: of the dense decoder's MLPs; hidden: of an expert. peaks: learning rates that are tried.
    vocabulary: of TinyStories' own.
    """

    rows: int
    steps: int
    shared: dict
    dense: int
    hidden: int
    experts: ExpertSizes
    peaks: tuple
    vocabulary: int = 1024


PLANS = {
    "grammar": Plan(16, 800, dict(tokens=128, embed=48, heads=4, layers=2), 64, 30,
                    ExpertSizes(8, 2, auxiliary=0.01), (3e-3, 1e-2, 2e-2)),
    "tinystories": Plan(16, 1_500, dict(tokens=128, embed=64, heads=4, layers=2), 128, 29,
                        ExpertSizes(16, 2, shared=64, auxiliary=0.01, block=32), (5e-3, 1e-2, 2e-2)),
}


def configs(corpus, vocabulary):
    """{model: its DecoderConfig}. ValueError unless a token uses as many parameters in both."""
    plan = PLANS[corpus]
    both = {"dense": DecoderConfig(vocabulary, **plan.shared, hidden=plan.dense),
            "experts": DecoderConfig(vocabulary, **plan.shared, hidden=plan.hidden,
                                     experts=plan.experts)}
    theirs, ours = map(used, both.values())
    if not 0 <= theirs - ours <= MOST_APART * theirs:
        raise ValueError(f"a token uses {ours:,} parameters with experts; expected at most the "
                         f"dense decoder's {theirs:,}, and at most {MOST_APART:.0%} fewer")
    return both


def used(config):
    """How many parameters one token uses."""
    return describe(config, plans.Plan(), rows=1).active


def one_run(data, corpus, steps, name, peak, seed):
    """(device, parameters, [(step, validation loss)]) of one model, learning rate and seed."""
    print(f"{corpus}, {name}, peak {peak}, seed {seed}", flush=True)
    config = configs(corpus, data.encoding.n_vocab)[name]
    loss = language_loss if config.experts is None else balanced_loss
    make = lambda: Decoder(config, Sharding.none(), rngs=nnx.Rngs(seed))
    state, _, looks = train(make, data, PLANS[corpus].rows, steps, language_recipe(steps, peak),
                            loss, seed)
    whole = sum(x.size for x in jax.tree.leaves(state.params))
    (device,) = state.program.mesh.devices.flat
    return device.device_kind, whole, [[step, round(each, 4)] for step, each in looks]


def in_a_process(corpus, steps, *run):
    """one_run, in a process that has yet to start JAX and to read the corpus."""
    start(1)
    return one_run(read(corpus), corpus, steps, *run)


def read(corpus):
    """The Stories of a corpus, as they are planned."""
    return load(corpus, os.environ.get("MESHBOOK_DATA"), PLANS[corpus].vocabulary)


def compared(corpus, data, steps, seeds, peaks, jobs):
    """The record of both models on a corpus."""
    plan = PLANS[corpus]
    steps, peaks = steps or plan.steps, peaks or plan.peaks
    both = configs(corpus, data.encoding.n_vocab)
    runs = list(itertools.product(both, peaks, seeds))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn, max_tasks_per_child=1) as pool:
        ends = [pool.submit(in_a_process, corpus, steps, *run) for run in runs]
        found = dict(zip(runs, [end.result() for end in ends], strict=True))
    models = {}
    for name, config in both.items():
        looks = {peak: [found[name, peak, seed][2] for seed in seeds] for peak in peaks}
        finals = {peak: [each[-1][1] for each in of_seeds] for peak, of_seeds in looks.items()}
        best = min(finals, key=lambda peak: statistics.mean(finals[peak]))
        models[name] = {
            "parameters": found[name, best, seeds[0]][1], "used": used(config), "peak": best,
            "finals": [[peak, losses] for peak, losses in finals.items()], "looks": looks[best]}
    (device,) = {device for device, *_ in found.values()}
    return {"machine": machine(), "device": device, "source": data.source,
            "sizes": plan.shared | {"dense": plan.dense, "hidden": plan.hidden,
                                    "experts": dataclasses.asdict(plan.experts)},
            "vocabulary": data.encoding.n_vocab, "rows": plan.rows, "steps": steps,
            "tokens": steps * plan.rows * plan.shared["tokens"], "seeds": list(seeds), "models": models}


def main(arguments=None):
    """Train, compare, and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpora", nargs="*", help=f"some of {', '.join(PLANS)}")
    parser.add_argument("--steps", type=int, help="of each run; default: as planned")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--peaks", type=float, nargs="+", help="default: as planned")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (1)")
    parser.add_argument("--record", type=Path, default=RECORD)
    asked, folder = parser.parse_args(arguments), os.environ.get("MESHBOOK_DATA")
    corpora = asked.corpora or [name for name in PLANS if folder or name == "grammar"]
    command = " ".join(["python -m benchmarks.experts_learning", *(arguments or sys.argv[1:])])
    record = json.loads(asked.record.read_text("utf8")) if asked.record.exists() else {}
    for corpus in corpora:
        begin = time.time()
        found = compared(corpus, read(corpus), asked.steps, asked.seeds, asked.peaks,
                         asked.jobs)
        record[corpus] = {"provenance": provenance(command, ("jax", "jaxlib", "flax", "optax")),
                          "seconds": round(time.time() - begin), **found}
        tinystories.write(record, asked.record)
        for name, model in found["models"].items():
            print(corpus, name, json.dumps(model["finals"]),
                  f"{model['used']:,} of {model['parameters']:,}", flush=True)


if __name__ == "__main__":
    main()
