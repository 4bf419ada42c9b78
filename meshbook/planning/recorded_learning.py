"""What was recorded when models learned: losses, and what they wrote.

The records are in results/: decoder_learning.json, experts_learning.json and tinystories.json, each
of the command of its name in benchmarks/. Where one is not there, nothing is drawn, and a page
shows nothing.
"""
from __future__ import annotations

import json
import math
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path

from meshbook.drawing.figures import curves
from meshbook.planning.topologies import RESULTS


def _part(name, part, folder):
    path = Path(folder) / f"{name}.json"
    return json.loads(path.read_text("utf8")).get(part) if path.exists() else None


def _printed(text):
    """A text in lines of at most 76 signs; what cannot be printed is a dot."""
    signs = "".join(c if c.isprintable() else "·" for c in " ".join(text.split()))
    return textwrap.fill(signs, 76)


def decoder_learning(corpus: str, folder: Path | str = RESULTS):
    """The record of both models on "grammar" or "tinystories"; None where there is none."""
    return _part("decoder_learning", corpus, folder)


def draw_decoder_learning(corpus: str, folder: Path | str = RESULTS):
    """Both validation losses over the tokens that were read, or None without a record.

    The loss before training is left out: beside it the rest would be a flat line.
    """
    found = decoder_learning(corpus, folder)
    if found is None:
        return None
    each = found["tokens"] / found["steps"] / 1e6
    lines = {name: ([step * each for step, _ in model["looks"][1:]],
                    [loss for _, loss in model["looks"][1:]])
             for name, model in found["models"].items()}
    ends = " and ".join(f"{loss[-1]:.3f} with {name}" for name, (_, loss) in lines.items())
    return curves(lines, "million tokens", "validation loss, nats per token",
                  f"Validation loss on {found['source']} after {found['tokens']:,} tokens: {ends}")


def told_of_decoder_learning(corpus: str, folder: Path | str = RESULTS):
    """What both models are and how they ended, as lines; "" without a record."""
    found = decoder_learning(corpus, folder)
    if found is None:
        return ""
    bits = 1 / math.log(2) / found["bytes per token"]
    lines = [f"{found['source']}: {found['vocabulary']:,} tokens in the vocabulary, "
             f"{found['tokens']:,} read in {found['steps']:,} steps"]
    for name, model in found["models"].items():
        loss = model["looks"][-1][1]
        accepted = f", {model['accepted']:.0%} accepted" if "accepted" in model else ""
        lines.append(f"  {name:8} {model['parameters']:>9,} parameters, "
                     f"{model['flops per token'] / 1e6:.2f} MFLOP per token: {loss:.3f} nats, "
                     f"{loss * bits:.3f} bits per byte{accepted}")
        rates = ", ".join(f"{loss:.3f} at {peak:g}" for peak, loss in model["finals"])
        lines.append(f"           by highest learning rate: {rates}")
    return "\n".join(lines)


def samples_of_decoder_learning(corpus: str, folder: Path | str = RESULTS):
    """What each model wrote after the same prompt, as lines; "" without a record."""
    found = decoder_learning(corpus, folder)
    if found is None:
        return ""
    lines = []
    for name, model in found["models"].items():
        lines += [f"{name}:", _printed(model["sample"]), ""]
    return "\n".join(lines).rstrip()


def experts_learning(corpus: str, folder: Path | str = RESULTS):
    """The record of a dense decoder and one with experts on "grammar" or "tinystories", or None."""
    return _part("experts_learning", corpus, folder)


def draw_experts_learning(corpus: str, folder: Path | str = RESULTS):
    """Validation losses over the tokens that were read, means over seeds; None without a record.

    The looks of the first quarter are left out: beside them the rest would be a flat line.
    """
    found = experts_learning(corpus, folder)
    if found is None:
        return None
    each, lines = found["tokens"] / found["steps"] / 1e6, {}
    for name, model in found["models"].items():
        late = list(zip(*model["looks"], strict=True))[len(model["looks"][0]) // 4:]
        lines[name] = ([looks[0][0] * each for looks in late],
                       [statistics.mean(loss for _, loss in looks) for looks in late])
    ends = "; ".join(f"{name} {loss[-1]:.3f}" for name, (_, loss) in lines.items())
    return curves(lines, "million tokens", "validation loss, nats per token",
                  f"Mean validation loss over {len(found['seeds'])} seeds on {found['source']} "
                  f"after {found['tokens']:,} tokens: {ends}")


def told_of_experts_learning(corpus: str, folder: Path | str = RESULTS):
    """What both models are and how each seed ended, as lines; "" without a record."""
    found = experts_learning(corpus, folder)
    if found is None:
        return ""
    lines = [f"{found['source']}: {found['tokens']:,} tokens in {found['steps']:,} steps"]
    for name, model in found["models"].items():
        ends = ", ".join(f"{looks[-1][1]:.3f}" for looks in model["looks"])
        lines.append(f"  {name:8} {model['used']:,} of {model['parameters']:,} parameters used, "
                     f"rate {model['peak']:g}: {ends}")
    return "\n".join(lines)


def tinystories(part: str, folder: Path | str = RESULTS):
    """A part of the record of TinyStories, "stories" or "training"; None where there is none."""
    return _part("tinystories", part, folder)


def draw_training(folder: Path | str = RESULTS):
    """The recorded run on TinyStories: its training and validation loss, or None without one."""
    run = tinystories("training", folder)
    if run is None:
        return None
    looks = run["looks"]
    found = {"training": tuple(zip(*run["losses"])),
             "validation": ([look["step"] for look in looks],
                            [look["validation"] for look in looks])}
    first, last = looks[0]["validation"], looks[-1]["validation"]
    return curves(found, "step", "loss in nats per token",
                  f"Training and validation loss on TinyStories in {run['steps']:,} steps: "
                  f"validation falls from {first:.2f} to {last:.2f} nats per token",
                  marks=[("guessing", math.log(run["config"]["vocabulary"]))])


def written_samples(looks: Sequence[int] = (0, 1, -1), prompt: int = 0,
                    folder: Path | str = RESULTS):
    """What the recorded model wrote after a prompt at some of its looks, as lines; "" without one.

    looks: which of the recorded ones, 0 for that before training; prompt: its number.
    """
    run = tinystories("training", folder)
    if run is None:
        return ""
    chosen = sorted({range(len(run["looks"]))[look] for look in looks if
                     -len(run["looks"]) <= look < len(run["looks"])})
    lines = []
    for look in (run["looks"][place] for place in chosen):
        lines += [f"After {look['step']:,} steps, validation {look['validation']:.2f} nats per "
                  f"token ({look['bits per byte']:.2f} bits per byte):",
                  _printed(run["prompts"][prompt] + look["samples"][prompt]), ""]
    return "\n".join(lines).rstrip()
