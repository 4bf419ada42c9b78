"""What is measured on an accelerator: the cells. A cell is a model, a batch and a dtype."""

from dataclasses import dataclass, replace

import numpy as np

from meshbook.models import MiniGPTConfig, ViTConfig

CALLS = 8  # steps in one call, where there are several


@dataclass(frozen=True)
class Cell:
    """One problem: model "vit" or "gpt", rows a batch, dtype, layers; tiny: a test's size."""

    model: str
    batch: int
    dtype: str
    layers: int
    tiny: bool = False

    @property
    def name(self):
        blocks = f", {self.layers} blocks" if self.model == "gpt" else ""
        return f"{self.model}, batch {self.batch:,}{blocks}, {self.dtype}"

    @property
    def config(self):
        """The sources' own sizes, or those of a test."""
        if self.model == "vit":
            small = dict(embed=32, hidden=64, heads=4, patch=8) if self.tiny else {}
            return ViTConfig(layers=self.layers, dtype=self.dtype, **small)
        small = dict(vocabulary=250, tokens=16, embed=32, hidden=64, heads=4)
        return MiniGPTConfig(
            layers=self.layers, dtype=self.dtype, **(small if self.tiny else {}))

    @property
    def items(self):
        """(how many a step, of what)."""
        if self.model == "vit":
            return self.batch, "images"
        return self.batch * self.config.tokens, "tokens"

    def batches(self, count=1):
        """Random inputs and labels as NumPy arrays, (count, B, ...)."""
        random, c = np.random.default_rng(0), self.config
        if self.model == "vit":
            shape = count, self.batch, c.image, c.image, 3
            labels = random.integers(0, c.classes, shape[:2]).astype(np.int32)
            return {"inputs": random.standard_normal(shape, np.float32), "labels": labels}
        text = random.integers(0, c.vocabulary, (count, self.batch, c.tokens + 1), np.int32)
        return {"inputs": text[..., :-1], "labels": text[..., 1:]}


def cells(tiny):
    """All cells, those first that must not be missing when the time is over."""
    full = [
        Cell("vit", 1024, "bfloat16", 6), Cell("gpt", 256, "bfloat16", 4),
        Cell("vit", 128, "bfloat16", 6), Cell("vit", 4096, "bfloat16", 6),
        Cell("gpt", 256, "bfloat16", 8), Cell("vit", 1024, "float32", 6),
        Cell("gpt", 256, "float32", 4), Cell("vit", 128, "float32", 6),
        Cell("vit", 4096, "float32", 6), Cell("gpt", 256, "float32", 8),
    ]
    if not tiny:
        return full
    chosen = full[0], full[1], full[5]
    return [replace(cell, batch=8, layers=2, tiny=True) for cell in chosen]
