"""What was recorded when the decoder and MiniGPT learned from the same tokens.

The record is results/decoder_learning.json, which `python -m benchmarks.decoder_learning` writes.
Where it is not there, nothing is drawn, and a page shows nothing.
"""
from __future__ import annotations

import json
import math
import statistics
import textwrap
from pathlib import Path

from meshbook.drawing.figures import curves
from meshbook.planning.topologies import RESULTS


def decoder_learning(corpus: str, folder: Path | str = RESULTS):
    """The record of both models on "grammar" or "tinystories"; None where there is none."""
    path = Path(folder) / "decoder_learning.json"
    return json.loads(path.read_text("utf8")).get(corpus) if path.exists() else None


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
        text = "".join(c if c.isprintable() else "·" for c in " ".join(model["sample"].split()))
        lines += [f"{name}:", textwrap.fill(text, 76), ""]
    return "\n".join(lines).rstrip()


def experts_learning(corpus: str, folder: Path | str = RESULTS):
    """The record of a dense decoder and one with experts on "grammar" or "tinystories", or None."""
    path = Path(folder) / "experts_learning.json"
    return json.loads(path.read_text("utf8")).get(corpus) if path.exists() else None


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
