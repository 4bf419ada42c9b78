"""The sizes of a decoder, and what its layers keep for the backward pass."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from meshbook.models.expert_layers import ExpertSizes
from meshbook.models.row_attention import FOUND
from meshbook.models.text_models import TextSizes

POLICIES = {  # what a layer keeps for the backward pass; the rest is computed again
    "all": jax.checkpoint_policies.nothing_saveable,
    "attention": jax.checkpoint_policies.save_only_these_names(FOUND),
    "products": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "none": jax.checkpoint_policies.everything_saveable,
}


@dataclass(frozen=True)
class DecoderConfig(TextSizes):
    """Sizes of a decoder.

    vocabulary: tokens that exist; tokens T: of the window; embed D, hidden F, heads H, layers L;
    groups G: of heads that share keys and values, 0 for as many as heads; latent R: numbers of a
    latent from which keys and values are made, 0 for none; rotary P: of the part of queries and
    keys that has positions beside a latent; period: of so many layers the last has no positions,
    1 for none without; gated: SwiGLU, else GELU; bias: whether products have biases and norms
    shifts; remat: what is kept of a layer for the backward pass, a key of POLICIES; by_row: whether
    attention takes one row after the other, so that scores of all are never there at once, and what
    it finds counts as a product; experts: in the place of the MLP of a period's last layer, if any.
    dropout: share of numbers dropped in training; dtype: of activations and products;
    param_dtype: of parameters. Raises ValueError where sizes do not fit.
    """

    vocabulary: int = 50_257
    tokens: int = 256
    embed: int = 256
    hidden: int = 512
    heads: int = 8
    layers: int = 4
    groups: int = 0
    latent: int = 0
    rotary: int = 0
    period: int = 1
    gated: bool = True
    bias: bool = False
    remat: str = "none"
    by_row: bool = False
    experts: ExpertSizes | None = None
    dropout: float = 0.0
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    def __post_init__(self):
        super().__post_init__()
        if self.period < 1:
            raise ValueError(f"period is a number from 1; found {self.period}")
        for name in ("groups", "latent", "rotary"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is a number from 0; found {getattr(self, name)}")
        if self.groups and self.heads % self.groups:
            raise ValueError(f"{self.heads} heads do not divide into {self.groups} groups")
        if self.latent and self.groups:
            raise ValueError(f"keys and values come from groups of heads or from a latent; found "
                             f"groups={self.groups} and latent={self.latent}")
        if self.rotary and not self.latent:
            raise ValueError(f"rotary={self.rotary} is for latent attention; found latent=0")
        if self.turned % 2:
            raise ValueError(f"rotary positions turn pairs of numbers; found {self.turned}")
        if self.remat not in POLICIES:
            raise ValueError(f"remat is one of {', '.join(POLICIES)}; found {self.remat!r}")
        if self.layers % self.period:
            raise ValueError(f"{self.layers} layers do not divide into periods of {self.period}")

    @property
    def keeps(self):
        """The policy of what a layer keeps for the backward pass."""
        policy = POLICIES[self.remat]
        if self.by_row and self.remat == "products":
            both = jax.checkpoint_policies.save_from_both_policies
            return both(policy, POLICIES["attention"])
        return policy

    @property
    def narrow(self):
        """The variance of what is added to the residual stream: its sum over 2 L terms is 1."""
        return 1 / (2 * self.layers)

    @property
    def turned(self):
        """How many numbers of a query and of a key are turned by its position."""
        return self.rotary if self.latent else self.head_size

    @classmethod
    def jaxformer(cls, **sizes: Any):
        """The sizes of JAXformer; its experts are `JAXFORMER`, of expert_layers."""
        return cls(**dict(vocabulary=100_277, tokens=1024, embed=768, hidden=3072, heads=12,
                          layers=48, latent=128, rotary=128, period=6, gated=False, bias=True,
                          dropout=0.2) | sizes)
