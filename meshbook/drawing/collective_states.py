"""What each device holds after each step of a collective, by an algorithm that sends the least.

The least of devices that send to each other and add up themselves, that is.

All-reduce, all-gather and reduce-scatter go round a ring, in which each device sends to the next
one only (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
workstations"); in an all-to-all each device exchanges pieces with one other device at a time.
"""

import collections
from collections.abc import Sequence
from numbers import Real
from typing import NamedTuple


class Piece(NamedTuple):
    """One number that a device holds, and the devices whose numbers have been added up in it."""

    value: Real
    origins: frozenset


class Send(NamedTuple):
    """One piece on its way: from a device's slot to another device's slot."""

    source: int
    slot: int
    target: int
    to: int


class Step(NamedTuple):
    """What is sent in a step, in words and as Sends, and what each device holds after it.

    held: a row of slots for each device; an empty slot is None.
    """

    words: str
    sends: tuple
    held: tuple


def steps_of(kind: str, numbers: Sequence[Sequence[Real]]):
    """The Steps of a collective on k devices; the first is how it starts, without Sends.

    kind: such as "all-reduce"; numbers: a row for each of k devices, of one number for an
    all-gather, and of k numbers otherwise. Raises ValueError for rows of other lengths, for a kind
    that it does not know, and for an all-to-all whose k is no power of two, so that not all devices
    can be paired.
    """
    if kind not in _MOVES:
        raise ValueError(f"expected one of {', '.join(_MOVES)}; found {kind!r}")
    k, sizes = len(numbers), {len(row) for row in numbers}
    if sizes != {1 if kind == "all-gather" else k}:
        raise ValueError(f"{kind} on {k} devices expected rows of "
                         f"{1 if kind == 'all-gather' else k} numbers; found {sorted(sizes)}")
    own = [[Piece(value, frozenset([device])) for value in row]
           for device, row in enumerate(numbers)]
    if kind == "all-gather":
        own = [[row[0] if slot == device else None for slot in range(k)]
               for device, row in enumerate(own)]
    steps = [Step("what each device has", (), _frozen(own))]
    for words, adds, sends in _MOVES[kind](k):
        own = _after(own, sends, adds)
        steps.append(Step(words, tuple(sends), _frozen(own)))
    return steps


def _frozen(own):
    return tuple(map(tuple, own))


def _after(own, sends, adds):
    """What is held after Sends that all happen at once. What was only passed on is not kept."""
    new = [list(row) for row in own]
    for each in sends:
        if adds is not None:
            new[each.source][each.slot] = None
    for each in sends:
        piece, there = own[each.source][each.slot], own[each.target][each.to]
        if adds:
            piece = Piece(there.value + piece.value, there.origins | piece.origins)
        new[each.target][each.to] = piece
    return new


def _reduce_scatter(k):
    """Piece j starts behind device j, goes round, is added to, and ends at device j."""
    for turn in range(k - 1):
        yield "pass a piece on, add it", True, [
            Send(at, (at - turn - 1) % k, (at + 1) % k, (at - turn - 1) % k) for at in range(k)]


def _all_gather(k):
    """Each piece goes round once, and every device on the way keeps a copy."""
    for turn in range(k - 1):
        yield "pass a copy on", None, [
            Send(at, (at - turn) % k, (at + 1) % k, (at - turn) % k) for at in range(k)]


def _all_reduce(k):
    yield from _reduce_scatter(k)
    yield from _all_gather(k)


def _all_to_all(k):
    """In turn t, device i exchanges a piece with device i XOR t: its own for that one's."""
    if k & (k - 1):
        raise ValueError(f"an all-to-all in pairs expected a power of two; found {k} devices")
    for turn in range(1, k):
        pairs = ", ".join(f"{at}↔{at ^ turn}" for at in range(k) if at < at ^ turn)
        yield f"exchange {pairs}", False, [
            Send(at, at ^ turn, at ^ turn, at) for at in range(k)]


def _permute(k):
    yield "send everything to the next", False, [
        Send(at, slot, (at + 1) % k, slot) for at in range(k) for slot in range(k)]


_MOVES = {  # each gives for a step its words, whether it adds (None: a copy stays), its Sends
    "all-reduce": _all_reduce, "all-gather": _all_gather, "reduce-scatter": _reduce_scatter,
    "all-to-all": _all_to_all, "collective-permute": _permute,
}


def sent_pieces(steps: Sequence[Step]):
    """How many pieces each device sends in all steps together: {device: count}."""
    return dict(collections.Counter(each.source for step in steps for each in step.sends))


def results(steps: Sequence[Step]):
    """What each device holds at the end: a list of numbers for each, without empty slots."""
    return [[piece.value for piece in row if piece] for row in steps[-1].held]
