"""The rows of a table that says what a model is made of, in letters.

"D>HK" is a product that sums over D and makes H and K, and a matrix of these three; letters on both
sides are those of a batch of products ("ED>EF"). ">D" is a vector.

`when` names flags of a layer, all of which must be set, or not set where a "-" stands before.
"""
from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """A parameter, or a product, or both.

    letters: "what it sums over > what it makes". name: of the parameter in its model, which ends
    with the letters of the array. count: matrices or vectors of this shape that are one array, S of
    them, and one more where the flag `and_one_if` is set. when: flags. tokens: the dimensions
    over which a product is repeated; useful: all letters of its useful part, where that differs.
    again: the policies of rematerialisation under which the product is computed once more, a policy
    twice for two times. reads: the name of what it reads: products that read the same send one
    gradient back, and names with the same word before a "/" send theirs together. gradients:
    products of the backward pass, 1 where what is read has no gradient. backward: whether a
    parameter that was gathered is needed to go back: "always", "again" where the layer is computed
    again, or "never". inside: letters of the product into whose sum a bias goes. exact: whether it
    is used in float32 whatever the dtype of products. of: the shape of a parameter that has a row
    of its own and is used here once more. travels: whether its gradient travels alone.
    """

    letters: str
    name: str = ""
    count: int = 1
    when: str = ""
    and_one_if: str = ""
    tokens: str = "BT"
    useful: str = ""
    again: str = "attention all"
    reads: str = ""
    gradients: int = 2
    backward: str = "always"
    inside: str = ""
    exact: bool = False
    of: str = ""
    travels: bool = True
    is_parameter: bool = True
    is_product: bool = True

    @functools.cached_property
    def summed(self):
        """The letters that a product sums over."""
        before, _, made = self.letters.partition(">")
        return "".join(letter for letter in before if letter not in made)

    @functools.cached_property
    def made(self):
        """The letters that it makes of those."""
        before, _, made = self.letters.partition(">")
        return "".join(letter for letter in made if letter not in before)

    @functools.cached_property
    def shape(self):
        """The letters of the parameter, each once; of another row's, as they stand there."""
        return self.of or "".join(dict.fromkeys(self.letters.replace(">", "")))

    @functools.cached_property
    def title(self):
        """The name without the letters."""
        return self.name.rpartition("_")[0]

    @functools.cached_property
    def output(self):
        """The letters of what one of its products makes of tokens, "" of what makes nothing."""
        return self.tokens + self.letters.partition(">")[2] if self.summed else ""

    def number(self, flags: Set[str]):
        """How many arrays of this shape lie in one, in a layer with these flags."""
        return self.count + (self.and_one_if in flags)


@dataclass(frozen=True)
class Kept:
    """An array that a layer keeps for the backward pass.

    bytes: of a number, 0 for its dtype's; read: whether products read it, which take bfloat16 on a
    TPU unless they are told otherwise.
    """

    letters: str
    count: int = 1
    bytes: int = 0
    when: str = ""
    read: bool = False


@dataclass(frozen=True)
class Table:
    """A model: rows of what comes before its layers, of a layer, and of what comes after them.

    dims: {letter: fields of the config and numbers, multiplied; "a|b" is a, or b where a is 0}; of
    tokens T, those of a query W, and of keys U, "1" where a model has none.
    inputs: what a step is given; kept: what a layer keeps for the backward pass, by policy of
    rematerialisation; working: what is there at once where a layer goes back, all along ("layer"),
    and besides in its "attention" and in its "MLP", one after the other. logits: bytes of one of
    them where their loss is computed, 0 for those of the dtype.
    stacked: whether the layers of a kind are one array, and a loop; else each is on its own, and
    the compiler sums all gradients at once.
    """

    dims: Mapping[str, str]
    first: tuple[Row, ...]
    layer: tuple[Row, ...]
    last: tuple[Row, ...]
    inputs: tuple[Kept, ...]
    kept: Mapping[str, tuple[Kept, ...]]
    working: Mapping[str, tuple[Kept, ...]] = field(default_factory=dict)
    logits: int = 0
    stacked: bool = False


def chosen(rows: Iterable[Any], flags: Set[str]):
    """The rows whose `when` holds for these flags."""
    holds = lambda word: word[1:] not in flags if word[0] == "-" else word in flags
    return [row for row in rows if all(map(holds, row.when.split()))]
