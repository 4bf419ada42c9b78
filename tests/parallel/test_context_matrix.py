"""Every way of attention, on even and odd rings, with whole and with filled blocks, documents or not.

The reference is the sum as it is written, on one device: it shares no code with the package.
"""
import functools

import numpy as np
import pytest
from attention import Ring, apart, drawn, expected

from meshbook import proofs
from meshbook.parallel.context import gather_kv, ring_attention, ulysses
from meshbook.parallel.zigzag import Tokens

B, t, K = 1, 16, 4
PRODUCTS = 7  # two of a forward pass, five of a backward pass that makes scores again
METHODS = {"ring": (ring_attention, False), "zigzag": (ring_attention, True),
           "gather": (gather_kv, False), "gather, zigzag": (gather_kv, True),
           "ulysses": (ulysses, False)}
WAYS = 2, 3, 5, 7, 8


def tokens_of(name, ways, block):
    """How a device's tokens are cut: with Ulysses it has all of them."""
    method, zigzagged = METHODS[name]
    if method is ulysses:
        return Tokens(1, t * ways, False, block)
    return Tokens(ways, t, zigzagged, block)


def block_of(name, ways, filled):
    """A block whose last one is filled up, or is not, with at least two of them."""
    for block in range(3, t):
        tokens = tokens_of(name, ways, block)
        if tokens.in_chunk > 1 and (tokens.in_chunk * tokens.size > tokens.chunk) is filled:
            return block
    raise AssertionError("no such block")


@functools.cache
def sequence(ways, documents):
    """Arrays of two heads for each of `ways` groups, documents or None, and what one device finds."""
    arrays, segments = drawn(t * ways, H=2 * ways, G=ways, K=K, B=B, documents=documents, seed=ways)
    return arrays, segments, expected(arrays, segments)


def scores(tokens):
    """The scores that a device makes of each head that it has, in a pass."""
    r = tokens.in_chunk
    m, others = tokens.chunks * r, 2 * r * r if tokens.zigzagged else r * r
    return (m * (m + 1) // 2 + (tokens.ways - 1) * others) * tokens.size ** 2


def wire(name, n):
    """What a device sends, in units of its keys; two heads share a key.

    In a ring of two, up and down are one permute: the compiler keeps what the forward pass got.
    """
    if name == "ulysses":
        return 2 * (2 + 1 + 1 + 2) * (n - 1) / n
    return 4 * (n - 1) if name.startswith("gather") or n == 2 else 6 * (n - 1)


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("filled", [False, True], ids=["whole", "filled"])
@pytest.mark.parametrize("name", METHODS)
def test_all_find_what_one_device_finds_with_the_bytes_and_the_work_of_formulas(
        name, filled, documents, ways):
    arrays, segments, right = sequence(ways, documents)
    method, zigzagged = METHODS[name]
    block = block_of(name, ways, filled)
    ring = Ring(method, ways, arrays, segments, zigzagged=zigzagged, block=block)
    for found, wanted in zip(ring.found(), right, strict=True):  # of every head: one may be wrong
        for each, other in zip(np.moveaxis(found, 2, 0), np.moveaxis(wanted, 2, 0), strict=True):
            assert apart([each], [other]) < 2e-6
    u = 4 * B * t * ways * K
    sent = proofs.collectives(ring.program, ring.mesh).wire("context")
    assert sent == pytest.approx(wire(name, ways) * u, rel=1e-12)
    heads = 2 * ways // (ways if method is ulysses else 1)
    made = scores(tokens_of(name, ways, block))
    assert proofs.work(ring.program) == PRODUCTS * 2 * B * heads * K * made
