"""TinyStories themselves: their figures for chapter 7, and a model of chapter 8 trained on them.

    MESHBOOK_DATA=DIR python -m benchmarks.tinystories                 all of it: about 40 minutes
    MESHBOOK_DATA=DIR python -m benchmarks.tinystories --minutes 20    stop then; again to go on
    MESHBOOK_DATA=DIR python -m benchmarks.tinystories --steps 0       the figures only

The pages are built without these stories, so what they show of them is in results/tinystories.json:
lengths, padding, cuts and merges; and the run, with its losses and with what the model writes on
the way. The run has GPT-2's whole vocabulary, one process and one device, and stories kept apart.
It is saved in --folder after every part and goes on from there. Seconds are those of training with
its first compiling and saving, without evaluation and without writing stories.
"""

import argparse
import hashlib
import itertools
import json
import math
import os
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from benchmarks.__main__ import ROOT, machine, provenance
from helpers import start
from meshbook.data import stories, tokens, vocabulary
from meshbook.models import MiniGPT, MiniGPTConfig, generate
from meshbook.models.fused_loss import one_pass_cross_entropy
from meshbook.models.losses import language_loss
from meshbook.planning.topologies import RESULTS
from meshbook.saving.checkpoints import Checkpoints
from meshbook.saving.runs import read_metrics
from meshbook.sharding import Sharding, make_mesh
from meshbook.training import create_state, evaluate, fit, language_recipe

WORD = " playground"
SIZES = dict(tokens=256, embed=128, hidden=512, heads=4, layers=4, dropout=0.1)
BATCH, CHUNK, SEED = 4, 512, 0
PEAK = 1e-3  # a run of 300 steps at 2e-3 learned no more than how frequent tokens are
STEPS, EVERY = 2_800, 200  # steps of the whole run, and of a part
HELD = 200  # stories that validate
PROMPTS = ("Once upon a time", "Lily and Ben were", "One day, a little dog")
WRITE = dict(length=120, temperature=0.7, top_p=0.9)


def figures(data, folder):
    """What chapter 7 tells of the stories in a folder: counts, lengths, and one word's merges."""
    lengths = np.diff(data.train.starts)
    steps = vocabulary.merges(data.encoding, WORD)
    return {
        "provenance": provenance(" ".join(["python -m benchmarks.tinystories", *sys.argv[1:]])),
        "files": {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)}
                  for paths in stories.text_files(Path(folder) / "tinystories") for path in paths},
        "vocabulary": asdict(data.train.vocabulary), "train sha256": data.train.sha256,
        "T": SIZES["tokens"], "shares": tokens.row_shares(lengths, SIZES["tokens"]),
        "bytes per token": data.bytes_per_token,
        "lengths": np.bincount(lengths).tolist(),  # how many stories have 0, 1, 2, ... tokens
        "merges": {WORD: [[[part.decode() for part in parts], made] for parts, made in steps]},
    }


def sha256(path):
    """The SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def split(data, held=HELD):
    """The same stories with `held` of them for validation; all others are for training.

    None that validates is in training, not even as another copy.
    """
    train, valid = data.train, data.validation
    of = lambda d: valid.ids[valid.starts[d]:valid.starts[d + 1]]
    kept = {of(d).tobytes() for d in range(min(held, len(valid)))}
    others = [of(d) for d in range(held, len(valid)) if of(d).tobytes() not in kept]
    some = valid.ids[:valid.starts[min(held, len(valid))] + 1]
    return replace(data, train=joined(data, [train.ids[:-1], *others]),
                   validation=joined(data, [some[:-1]]))


def joined(data, parts):
    """Runs of whole stories, each with the END that opens it, as one Tokens in memory."""
    end = data.encoding.eot_token
    ids = np.concatenate([*parts, np.array([end], np.uint16)])
    return tokens.Tokens(ids, np.flatnonzero(ids == end), data.train.vocabulary,
                         hashlib.sha256(ids).hexdigest())


def new_state(config, steps):
    """The state of a run that begins: the recipe of chapter 8, on one device."""
    loss = partial(language_loss, cross_entropy=partial(one_pass_cross_entropy, chunk=CHUNK))
    return create_state(lambda: MiniGPT(config, Sharding.none(), rngs=nnx.Rngs(SEED)),
                        language_recipe(steps, peak=PEAK), make_mesh((1, 1)), loss=loss)


def look(state, data):
    """Validation loss and what the model writes now."""
    rows = tokens.evaluation_batches(data.validation, BATCH, state_window(state), documents=True)
    loss = evaluate(state, rows)["loss"]
    end = data.encoding.eot_token
    prompts = [[end, *data.encoding.encode_ordinary(prompt)] for prompt in PROMPTS]
    written = generate(state, prompts, WRITE["length"], jax.random.key(SEED), stop=end,
                       temperature=WRITE["temperature"], top_p=WRITE["top_p"])
    return {"step": int(state.step), "validation": loss,
            "bits per byte": loss / math.log(2) / data.bytes_per_token,
            "perplexity": math.exp(loss), "samples": list(map(data.encoding.decode, written))}


def state_window(state):
    """T: how many tokens the model sees at once."""
    return state.program.model(state.params).config.tokens


def train(data, config, steps, every, deadline, folder):
    """Train until `steps` or the deadline: (looks, {step: loss}); a part is never begun too late.

    looks: one before training and one after each part, with the seconds of training until then.
    """
    path, key, longest = Path(folder) / "looks.json", jax.random.key(SEED), 0.0
    stream = tokens.batches(data.train, BATCH, config.tokens, SEED, documents=True)
    state = new_state(config, steps)
    with Checkpoints(folder, keep=2) as checkpoints:
        state, key = checkpoints.resume(state, stream, key)
        save = checkpoints.on_step(stream, key, every=every)
        looks = json.loads(path.read_text("utf8")) if path.exists() else []
        looks = [each for each in looks if each["step"] <= int(state.step)]
        seconds = metrics_of(folder, "seconds").get(int(state.step), 0.0)
        while True:
            step, begin = int(state.step), time.time()
            if not looks or looks[-1]["step"] < step:
                looks.append(look(state, data) | {"seconds": round(seconds, 1)})
                path.write_text(json.dumps(looks, ensure_ascii=False), "utf8")
                print("step {step}: validation {validation:.3f}, {seconds:,.0f} s".format(
                    **looks[-1]), flush=True)
            if step >= steps or time.time() + longest > deadline:
                break
            clock = Clock(seconds)
            part = itertools.islice(stream, min(every - step % every, steps - step))
            state, _ = fit(state, part, key, lambda state, metrics, clock=clock: save(
                state, metrics | {"seconds": clock()}))
            seconds, longest = clock(), max(longest, time.time() - begin)
    losses = metrics_of(folder, "loss")
    return looks, {step: losses[step] for step in sorted(losses) if step <= looks[-1]["step"]}


class Clock:
    """Seconds of training: those before, and those since it was made."""

    def __init__(self, before):
        self.before, self.begin = before, time.time()

    def __call__(self):
        return self.before + time.time() - self.begin


def metrics_of(folder, name):
    """{step: value} of what a run has written, in all of its processes."""
    return read_metrics(Path(folder) / "metrics").get(name, {})


def smoothed(losses, count=150):
    """[(last step, mean loss)] of at most so many runs of neighbouring steps."""
    steps = sorted(losses)
    size = max(1, -(-len(steps) // count))
    runs = [steps[i:i + size] for i in range(0, len(steps), size)]
    return [[run[-1], round(sum(losses[step] for step in run) / len(run), 4)] for run in runs]


def training(data, steps, every, minutes, folder):
    """The record of the run, as far as it has come."""
    begin, whole = time.time(), split(data)
    config = MiniGPTConfig(data.encoding.n_vocab, **SIZES)
    looks, losses = train(whole, config, steps, every, begin + 60 * minutes, folder)
    done, seconds = looks[-1]["step"], looks[-1]["seconds"]
    seen = done * BATCH * config.tokens
    return {
        "provenance": provenance(" ".join(["python -m benchmarks.tinystories", *sys.argv[1:]])),
        "machine": machine(), "mesh": [1, 1], "loss": "one_pass_cross_entropy",
        "config": SIZES | {"vocabulary": config.vocabulary}, "batch": BATCH, "peak": PEAK,
        "steps": done, "planned": steps, "tokens": seen, "seconds": round(seconds, 1),
        "tokens per second": round(seen / seconds) if seconds else None,
        "epochs": round(seen / len(whole.train.ids), 2),
        "train": {"stories": len(whole.train), "tokens": len(whole.train.ids),
                  "sha256": whole.train.sha256},
        "validation": {"stories": len(whole.validation), "tokens": len(whole.validation.ids),
                       "sha256": whole.validation.sha256,
                       "bytes per token": whole.bytes_per_token},
        "prompts": PROMPTS, "sampling": WRITE, "losses": smoothed(losses), "looks": looks,
    }


def write(record, path):
    """The record as JSON, a line for each of its parts and looks."""
    def lines(value, depth=0):
        if depth == 2 or not isinstance(value, dict):
            return json.dumps(value, ensure_ascii=False)
        inner = [f"{' ' * (depth + 1)}{json.dumps(name)}: {lines(each, depth + 1)}"
                 for name, each in value.items()]
        return "{\n" + ",\n".join(inner) + f"\n{' ' * depth}}}"

    path.parent.mkdir(exist_ok=True)
    path.write_text(lines(record) + "\n", "utf8")


def main(arguments=None):
    """Measure, train, and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS, help="of the whole run; 0: none")
    parser.add_argument("--every", type=int, default=EVERY, help="steps between two evaluations")
    parser.add_argument("--minutes", type=float, default=40, help="how long this call may take")
    parser.add_argument("--folder", default=ROOT / "_build" / "tinystories", help="checkpoints")
    parser.add_argument("--record", type=Path, default=RESULTS / "tinystories.json")
    asked = parser.parse_args(arguments)
    folder = os.environ.get("MESHBOOK_DATA")
    if not folder:
        sys.exit("MESHBOOK_DATA names no folder: expected one with TinyStories (make data)")
    start(1)
    data = stories.load(folder)
    record = json.loads(asked.record.read_text("utf8")) if asked.record.exists() else {}
    record["stories"] = figures(data, folder)
    write(record, asked.record)
    if asked.steps:
        record["training"] = training(data, asked.steps, asked.every, asked.minutes, asked.folder)
        write(record, asked.record)
    print(f"recorded in {asked.record}")


if __name__ == "__main__":
    main()
