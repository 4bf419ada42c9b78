"""The rules that say over which mesh axes each dimension of a tensor is split: a Sharding."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from flax.core import FrozenDict
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from meshbook.sharding.gradients import Parameter, opened, reduced, still_reduced, waiting
from meshbook.sharding.meshes import axes_of

LETTERS = "BTSHKDFXCV"  # dimensions of this book's models; `also` adds others


def spec_of(letters: str, rules: Mapping):
    """The PartitionSpec of a tensor with these dimensions, by one rule per letter.

    A mesh axis can split one dimension of a tensor only: the last that asks for it. Axes that are
    manual in an enclosing shard_map are left out: there an array is one device's part already.
    Raises KeyError for a letter without a rule.
    """
    taken, spec = set(jax.sharding.get_abstract_mesh().manual_axes), []
    for letter in reversed(letters):
        if letter not in rules:
            raise KeyError(f"no rule for dimension {letter} of {letters}: rules exist for "
                           f"{', '.join(sorted(rules))}; also({letter}=None) adds one")
        axes = tuple(axis for axis in axes_of(rules[letter]) if axis not in taken)
        taken.update(axes)
        spec.insert(0, axes[0] if len(axes) == 1 else axes or None)
    while spec and spec[-1] is None:
        spec.pop()
    return P(*spec)


@dataclass(frozen=True)
class Rules:
    """Over which mesh axes each dimension is split: one rule per letter.

    A rule is a mesh axis, a tuple of axes, or None. activations, parameters: {letter: rule}; a
    letter of LETTERS that is not named is not split. B batch, T tokens, S the three of query, key
    and value, H heads, K head size, D embed, F hidden, X numbers in a patch, C classes, V
    vocabulary. A parameter is used as an activation of its letters lies: what only `parameters`
    split is gathered before.

    none() splits nothing; data_parallel() splits the batch; tensor_parallel() heads, hidden units
    and vocabulary over "model" too, column then row (Shoeybi et al. 2019); fully_sharded() every D
    of a parameter over "batch" as well, as ZeRO stage 3 stores them (Rajbhandari 2020), gathered
    once per step and kept for the backward pass.
    """

    activations: Mapping = FrozenDict()
    parameters: Mapping = FrozenDict()

    def __post_init__(self):
        for name in ("activations", "parameters"):
            rules = dict.fromkeys(LETTERS) | dict(getattr(self, name))
            object.__setattr__(self, name, FrozenDict(rules))

    def activation(self, letters: str):
        """Where an activation of these letters lies; KeyError for an unknown letter."""
        return spec_of(letters, self.activations)

    def parameter(self, letters: str):
        """Where a parameter of these letters is stored; KeyError for an unknown letter."""
        return spec_of(letters, self.parameters)

    def used(self, letters: str, w: Parameter, dtype: DTypeLike):
        """A parameter in dtype where its activation lies; what its gradient waits for, it keeps."""
        return still_reduced(w.astype(dtype), self.activation(letters))

    def gather(self, letters: str, w: Parameter, dtype: DTypeLike):
        """A parameter as a sum needs it: in dtype, gathered where only parameters are split."""
        return jax.reshard(self.used(letters, w, dtype), self.activation(letters))

    def weight(self, letters: str, w: Parameter, dtype: DTypeLike):
        """A parameter as products with rows (B, T) need it: gathered, its gradient summed once."""
        return reduced(self.used(letters, w, dtype), *map(self.activations.get, "BT"))

    def lives(self, letters: str):
        """What a parameter notes of where its gradient lives: nothing, the compiler decides."""
        return {}

    def also(self, activations: Mapping | tuple = (), parameters: Mapping | tuple = (),
             **both: str | tuple[str, ...] | None):
        """These rules and more: for both kinds by letter, or for one of them; the new one wins."""
        return replace(
            self, activations=dict(self.activations) | both | dict(activations),
            parameters=dict(self.parameters) | both | dict(parameters),
        )

    def in_stages(self, axis: str = "stage"):
        """These rules, layers L split over this mesh axis, too, and the vocabulary first of all."""
        return self.also(L=axis, V=(axis, *axes_of(self.activations["V"])))

    @classmethod
    def none(cls):
        return cls()

    @classmethod
    def data_parallel(cls):
        return cls({"B": "batch"})

    @classmethod
    def tensor_parallel(cls):
        return cls.data_parallel().also(H="model", F="model", V="model")

    @classmethod
    def fully_sharded(cls):
        return cls.tensor_parallel().also(parameters={"D": "batch"})


@dataclass(frozen=True)
class Sharding(Rules):
    """Rules, and what is done by hand where they are not enough.

    gradients, moments: rules by which gradients and Adam's moments live, where they differ from the
    parameters'; with gradients=None the compiler sums gradients as the types ask, otherwise they
    are reduce-scattered by hand. regather: whether weights that a layer gathered are freed and
    gathered again in the backward pass; None: as the layer's other values. overlapped: tokens that
    are gathered before a product, or scattered after it, travel piece by piece while it runs
    (`meshbook.parallel.overlap`). float32_sums: of narrow types, devices' parts of a sum are added
    up before they are rounded, and travel as float32; where gradients are reduce-scattered by hand,
    those too, after each device's part was rounded. context: where tokens are split in attention,
    too, how queries reach the keys of other devices, a `meshbook.parallel.context.Context`.

    zero1() and zero2() keep parameters whole, sequence_parallel() splits tokens between products,
    context_parallel() splits them everywhere.
    """

    gradients: FrozenDict | None = None
    moments: FrozenDict = FrozenDict()
    regather: bool | None = None
    overlapped: bool = False
    float32_sums: bool = False
    context: Any = None

    def used(self, letters: str, w: Parameter, dtype: DTypeLike):
        """A parameter in dtype where its activation lies; what its gradient waits for, it keeps."""
        if self.gradients is None:
            return super().used(letters, w, dtype)
        spec = waiting(self.activation(letters), *map(self.activations.get, "BT"))
        return opened(w, spec, dtype) if self.float32_sums else opened(w.astype(dtype), spec)

    def lives(self, letters: str):
        """{"lives": Lives} of a parameter whose gradient is reduce-scattered by hand, else {}."""
        if self.gradients is None:
            return {}
        used = waiting(self.activation(letters), *map(self.activations.get, "BT"))
        gradient, moments = (spec_of(letters, dict(self.parameters) | dict(rules))
                             for rules in (self.gradients, self.moments))
        return {"lives": Lives(used, gradient, moments, letters.startswith("L"))}

    @classmethod
    def sequence_parallel(cls, overlapped: bool = False, regather: bool | None = None):
        """tensor_parallel(), the tokens of what lies between products split over "model", too.

        regather: whether tokens that were gathered are freed, and gathered again in the backward
        pass, with 5/4 of the bytes on the wire and 1/n of them kept.
        """
        rules = cls.tensor_parallel().also(activations={"T": "model"})
        return replace(rules, overlapped=overlapped, regather=regather)

    @classmethod
    def context_parallel(cls, context: Any):
        """data_parallel(), the tokens of all activations split over the context's axis, too."""
        return replace(cls.data_parallel().also(activations={"T": context.axis}), context=context)

    @classmethod
    def fully_sharded(cls, regather: bool | None = None):
        """regather: whether gathered weights are freed, and gathered again in the backward pass.

        Either way gradients are reduce-scattered by hand. None: the compiler does with both what
        it does; on a CPU it keeps the weights, and all-reduces gradients.
        """
        rules = super().fully_sharded()
        return rules if regather is None else replace(
            rules, gradients=FrozenDict(), regather=regather)

    @classmethod
    def zero1(cls):
        """tensor_parallel(), but that the moments' D is split over "batch" as well."""
        own = FrozenDict(D="batch")
        rules = cls.tensor_parallel()
        return replace(rules, gradients=FrozenDict(), moments=own, regather=True)

    @classmethod
    def zero2(cls):
        """zero1() whose gradients are split like the moments, as soon as a layer has made them."""
        return replace(cls.zero1(), gradients=FrozenDict(D="batch"))


@dataclass(frozen=True)
class Lives:
    """Where a parameter is used, its gradient and moments live; looped: inside a scan of layers."""

    used: P
    gradient: P
    moments: P
    looped: bool


def beside(sharding: Sharding, letters: str, w: Parameter, x: Float[Array, "..."]):
    """A parameter of these letters, the last of x, in x's dtype: to be added to x or multiplied.

    Where it is typed `reduced` it is repeated along the dimensions that split x, such as B, so that
    its gradient is a partial sum.
    """
    w, spec = sharding.used(letters, w, x.dtype), jax.typeof(x).sharding.spec
    if not jax.typeof(w).sharding.spec.reduced:
        return w
    last, first = tuple(range(x.ndim - w.ndim, x.ndim)), x.ndim - w.ndim
    shape = [size if axes_of(rule) else 1 for size, rule in zip(x.shape[:first], spec.partitions)]
    return jax.lax.broadcast_in_dim(w, (*shape, *w.shape), last, out_sharding=spec)
