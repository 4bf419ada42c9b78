"""The decoder of Part IV against the MiniGPT of chapter 8: the same tokens, no more parameters.

    python -m benchmarks.decoder_learning grammar                           a few minutes
    MESHBOOK_DATA=DIR python -m benchmarks.decoder_learning tinystories     some more
    python -m benchmarks.decoder_learning                                   what there is of both

Both models see the same batches in the same order, stories kept apart, under the book's loss and
its optimizer (`language_recipe`), on one device. Each is trained once with each of PEAKS, from the
same seed, and the run that ends with the lowest validation loss counts. TinyStories are read with
a vocabulary learned from their training set: with GPT-2's, nearly all parameters would be those
of embedding and head. What is recorded is in results/decoder_learning.json.
"""

import argparse
import itertools
import json
import math
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import jax
from flax import nnx

from benchmarks import tinystories
from benchmarks.__main__ import machine, provenance
from helpers import start
from meshbook.data import grammar, stories, tokens, vocabulary
from meshbook.models import MiniGPT, MiniGPTConfig, generate
from meshbook.models.decoder import Decoder, DecoderConfig
from meshbook.models.losses import language_loss
from meshbook.planning.topologies import RESULTS
from meshbook.proofs import work
from meshbook.sharding import Sharding, make_mesh
from meshbook.training import compile_step, create_state, evaluate, fit, language_recipe

RECORD = RESULTS / "decoder_learning.json"
SEED, PEAKS, PARTS, HELD, VOCABULARY = 0, (1e-3, 3e-3, 1e-2), 8, 32, 2048
MOST_APART = 0.02  # by how much the decoder may have fewer parameters
PROMPTS = {"grammar": "By the sea", "tinystories": "Once upon a time"}
WRITE = dict(length=100, temperature=0.7)
JUDGED = 64  # stories that the grammar judges
SIZES = {  # (rows B, steps, MiniGPT's sizes, the decoder's)
    "grammar": (16, 600, dict(tokens=128, embed=96, hidden=384, heads=4, layers=2),
                dict(tokens=128, embed=96, hidden=216, heads=4, layers=3)),
    "tinystories": (8, 1_200, dict(tokens=128, embed=96, hidden=384, heads=4, layers=4),
                    dict(tokens=128, embed=96, hidden=328, heads=4, layers=5)),
}


def load(corpus, folder=None, size=VOCABULARY):
    """The Stories of a corpus; TinyStories, from the folder, in `size` tokens of their own."""
    if corpus == "grammar":
        return stories.load_grammar()
    whole = tinystories.split(stories.load_tinystories(folder))
    texts = {name: texts_of(getattr(whole, name), whole.encoding)
             for name in ("train", "validation")}
    encoding = vocabulary.learn(texts["train"], size, name="tinystories")
    with tempfile.TemporaryDirectory() as where:
        read = {}
        for name, some in texts.items():
            tokens.write_tokens(some, encoding, Path(where) / name)
            read[name] = tokens.read_tokens(Path(where) / name, encoding)
        return replace(whole, encoding=encoding, **read)  # files stay mapped


def texts_of(some, encoding):
    """The stories of a Tokens as texts."""
    return [encoding.decode(some.ids[a + 1:b].tolist())
            for a, b in itertools.pairwise(some.starts)]


def makers(corpus, size):
    """{model: a function that makes it} at the sizes of a corpus, for a vocabulary of `size`."""
    _, _, theirs, ours = SIZES[corpus]
    configs = MiniGPTConfig(size, dropout=0.0, **theirs), DecoderConfig(size, **ours)
    rules = Sharding.none()
    return {"MiniGPT": lambda: MiniGPT(configs[0], rules, rngs=nnx.Rngs(SEED)),
            "decoder": lambda: Decoder(configs[1], rules, rngs=nnx.Rngs(SEED))}


def train(make, data, rows, steps, optimizer, loss=language_loss, seed=SEED):
    """One run: (state, {step: training loss}, [(step, validation loss)]).

    seed: of the order of the batches. Validation is on the first HELD batches of what is held out, or all where there are fewer.
    """
    state = create_state(make, optimizer, make_mesh((1, 1)), loss=loss)
    window, losses = tinystories.state_window(state), {}
    stream = tokens.batches(data.train, rows, window, seed, documents=True)
    look = lambda: evaluate(state, itertools.islice(tokens.evaluation_batches(
        data.validation, rows, window, documents=True), HELD))["loss"]
    looks = [(0, look())]
    marks = [steps * (part + 1) // PARTS for part in range(PARTS)]
    for before, step in itertools.pairwise([0, *marks]):
        state, history = fit(state, itertools.islice(stream, step - before), jax.random.key(seed))
        losses |= {before + 1 + at: each["loss"] for at, each in enumerate(history)}
        looks.append((step, look()))
        print(f"  step {step}: validation {looks[-1][1]:.3f}", flush=True)
    return state, losses, looks


def flops_per_token(state, data, rows):
    """What the compiled step computes for a token, by proof 1's count."""
    window = tinystories.state_window(state)
    batch = next(tokens.batches(data.train, rows, window, SEED, documents=True))
    program = compile_step(state, state.program.place(batch), jax.random.key(SEED))
    return work(program) / (rows * window)


def written(state, data, corpus):
    """What a trained model writes: a text, and which share of stories the grammar accepts."""
    end, prompt = data.encoding.eot_token, PROMPTS[corpus]
    continued = lambda prompts, key: [data.encoding.decode(row) for row in generate(
        state, prompts, key=jax.random.key(key), stop=end, **WRITE)]
    (text,) = continued([[end, *data.encoding.encode_ordinary(prompt)]], SEED)
    told = {"sample": prompt + text}
    if data.is_stand_in:
        stories_told = continued([[end]] * JUDGED, SEED + 1)
        told["accepted"] = sum(map(grammar.accepts, stories_told)) / JUDGED
    return told


def compared(corpus, data, steps=None):
    """The record of both models on a corpus."""
    rows, planned, *sizes = SIZES[corpus]
    steps, models = steps or planned, {}
    for (name, make), size in zip(makers(corpus, data.encoding.n_vocab).items(), sizes):
        runs = {}
        for peak in PEAKS:
            print(f"{corpus}, {name}, peak {peak}", flush=True)
            runs[peak] = train(make, data, rows, steps, language_recipe(steps, peak))
        finals = {peak: looks[-1][1] for peak, (_, _, looks) in runs.items()}
        best = min(finals, key=finals.get)
        state, losses, looks = runs[best]
        models[name] = {
            "sizes": size, "parameters": sum(x.size for x in jax.tree.leaves(state.params)),
            "flops per token": flops_per_token(state, data, rows),
            "peak": best, "finals": [[peak, round(loss, 4)] for peak, loss in finals.items()],
            "losses": tinystories.smoothed(losses, 60),
            "looks": [[step, round(loss, 4)] for step, loss in looks],
            **written(state, data, corpus)}
    check(models)
    window = sizes[0]["tokens"]
    return {"source": data.source, "vocabulary": data.encoding.n_vocab, "rows": rows,
            "steps": steps, "tokens": steps * rows * window, "seed": SEED,
            "bytes per token": data.bytes_per_token, "prompt": PROMPTS[corpus],
            "sampling": WRITE, "models": models}


def check(models):
    """ValueError unless the decoder has as few parameters as MiniGPT, or a little fewer."""
    theirs, ours = (models[name]["parameters"] for name in ("MiniGPT", "decoder"))
    if not 0 <= theirs - ours <= MOST_APART * theirs:
        raise ValueError(f"the decoder has {ours:,} parameters; expected at most MiniGPT's "
                         f"{theirs:,}, and at most {MOST_APART:.0%} fewer")


def main(arguments=None):
    """Train, compare, and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpora", nargs="*", help=f"some of {', '.join(SIZES)}")
    parser.add_argument("--steps", type=int, help="of each run; default: as planned")
    parser.add_argument("--record", type=Path, default=RECORD)
    asked, folder = parser.parse_args(arguments), os.environ.get("MESHBOOK_DATA")
    corpora = asked.corpora or [name for name in SIZES if folder or name == "grammar"]
    start(1)
    record = json.loads(asked.record.read_text("utf8")) if asked.record.exists() else {}
    command = " ".join(["python -m benchmarks.decoder_learning", *(arguments or sys.argv[1:])])
    for corpus in corpora:
        begin = time.time()
        found = compared(corpus, load(corpus, folder), asked.steps)
        record[corpus] = {"provenance": provenance(command), "machine": machine(),
                          "seconds": round(time.time() - begin), **found}
        tinystories.write(record, asked.record)
        ends = {name: model["looks"][-1][1] for name, model in found["models"].items()}
        bits = {name: loss / math.log(2) / found["bytes per token"] for name, loss in ends.items()}
        print(f"{corpus}: {ends} nats per token, {bits} bits per byte, in {asked.record}")


if __name__ == "__main__":
    main()
