"""Seconds on rings, lines and tori of any size: those of pieces that are sent step by step."""
import collections
import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from test_wire import Ring, ring_all_gather, ring_all_reduce, ring_broadcast, ring_reduce_scatter

from meshbook.costs.devices import DEVICES
from meshbook.hlo.collectives import Moved
from meshbook.hlo.wire import wire_bytes, wire_seconds

V5E = DEVICES["TPU v5e"]
QUICK, SLOW = (dataclasses.replace(V5E, **change) for change in (
    {"hop": 0.0}, {"link": 1e30}))
BY_STEPS = {"reduce-scatter": ring_reduce_scatter, "all-gather": ring_all_gather,
            "all-reduce": ring_all_reduce, "collective-broadcast": ring_broadcast}


@pytest.mark.parametrize("kind", BY_STEPS)
@examples(30)
@given(st.integers(2, 13), st.integers(1, 4), st.sampled_from([np.int8, np.float32]))
def test_a_ring_of_any_number_sends_what_the_formula_says(kind, ways, each, dtype):
    ring = Ring(ways)
    x_kn = np.random.default_rng(0).integers(0, 9, (ways, each * ways)).astype(dtype)
    (result, *_), expected = BY_STEPS[kind](ring, list(x_kn)), {
        "reduce-scatter": x_kn[:, :each].sum(0), "all-gather": x_kn.ravel(),
        "all-reduce": x_kn.sum(0), "collective-broadcast": x_kn[0]}[kind]
    np.testing.assert_array_equal(result, expected)
    assert max(ring.sent) == max(ring.received) == wire_bytes(kind, ways, result.nbytes)


def steps_between(size, ring):
    """{(from, to): [(share, the links on its way)]}: the shorter way, or half each way."""
    found = {}
    for start in range(size):
        for end in set(range(size)) - {start}:
            up = [((start + i) % size, 1) for i in range((end - start) % size)]
            down = [((start - i) % size, -1) for i in range((start - end) % size)]
            if not ring:
                ways = [(1, up if end > start else down)]
            elif len(up) == len(down):
                ways = [(0.5, up), (0.5, down)]
            else:
                ways = [(1, min(up, down, key=len))]
            found[start, end] = ways
    return found


def busiest(size, ring):
    """The most pieces that cross one link in one direction where each sends a piece to each."""
    crossed = collections.Counter()
    for ways in steps_between(size, ring).values():
        for share, links in ways:
            for link in links:
                crossed[link] += share
    # between two chips there is one link, whichever way round a ring goes
    return max(crossed.values()) * (2 if ring and size == 2 else 1)


@examples(60)
@given(st.lists(st.integers(2, 9), min_size=1, max_size=2), st.booleans(), st.integers(1, 10**9))
def test_an_all_to_all_takes_as_long_as_the_busiest_link_of_any_torus(sizes, ring, size):
    """Along each dimension all that a line of chips has goes to where it belongs in it."""
    busy = max(busiest(each, ring) / each for each in sizes)
    found = wire_seconds("all-to-all", sizes, Moved(1, size), QUICK, ring)
    assert found == pytest.approx(size * busy / V5E.link)


def farthest(size, ring):
    """Hops from a chip to the one that is farthest from it, the worst chip of all."""
    return max(max(len(links) for _, links in ways) for ways in steps_between(size, ring).values())


def gathered_in_steps(size, ring):
    """Steps in which all have all pieces: each sends one piece, or half of one, over each link.

    On a line the chip at its end has one link only.
    """
    if not ring or size == 2:
        return size - 1
    known, half = {(chip, chip, side): 0 for chip in range(size) for side in (0, 1)}, 0
    while len(known) < 2 * size * size:  # halves go round in both directions at once
        half += 1
        for chip in range(size):
            known.setdefault((chip, (chip - half) % size, 0), half)
            known.setdefault((chip, (chip + half) % size, 1), half)
    return half / 2


@examples(60)
@given(st.integers(2, 12), st.booleans(), st.integers(1, 10**9))
def test_gathers_and_sums_take_as_long_as_their_steps_of_any_ring_or_line(size, ring, whole):
    steps, links = gathered_in_steps(size, ring), V5E.link
    seconds = lambda kind, moved: wire_seconds(kind, [size], (1, moved), QUICK, ring)
    assert seconds("all-gather", whole) == pytest.approx(steps * whole / size / links)
    assert seconds("all-reduce", whole) == pytest.approx(2 * steps * whole / size / links)
    assert seconds("reduce-scatter", whole / size) == pytest.approx(steps * whole / size / links)
    assert seconds("collective-permute", whole) == pytest.approx(whole / links)


@examples(60)
@given(st.lists(st.integers(2, 9), min_size=1, max_size=2), st.booleans(), st.integers(1, 50))
def test_small_arrays_take_as_long_as_the_hops_to_the_farthest_chip(sizes, ring, count):
    hops = sum(farthest(each, ring) for each in sizes)
    kinds = {"all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "all-reduce": 2}
    for kind, times in kinds.items():
        found = wire_seconds(kind, sizes, Moved(count, 8 * count), SLOW, ring)
        assert found == pytest.approx(count * times * hops * V5E.hop)
    found = wire_seconds("collective-permute", sizes, Moved(count, 8 * count), SLOW, ring)
    assert found == pytest.approx(count * V5E.hop)
