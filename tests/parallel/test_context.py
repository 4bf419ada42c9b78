"""Attention over split tokens: equal to plain attention, the bytes and the work of formulas."""
import jax
import numpy as np
import pytest
from attention import Ring, apart, drawn, expected

from meshbook import proofs
from meshbook.parallel.context import Context, gather_kv, ring_attention, ulysses
from meshbook.parallel.zigzag import Tokens
from meshbook.sharding import make_mesh

B, H, K = 2, 8, 4
PRODUCTS = 7  # two of a forward pass, five of a backward pass that makes scores again


def squares(ways, T, block, zigzagged, method):
    """Scores that each device makes in a pass."""
    if method is ulysses:
        return squares(1, T, block, False, ring_attention) / ways
    tokens = Tokens(ways, T // ways, zigzagged, block)
    m, r = tokens.chunks * tokens.in_chunk, tokens.in_chunk
    others = 2 * r * r if zigzagged else m * m
    return (m * (m + 1) // 2 + (ways - 1) * others) * tokens.size ** 2


CASES = {
    "ring": (ring_attention, 4, 64, {"block": 8}, {}),
    "ring of two": (ring_attention, 2, 64, {"block": 8}, {}),
    "zigzag": (ring_attention, 4, 64, {"zigzagged": True}, {}),
    "zigzag in blocks": (ring_attention, 4, 64, {"zigzagged": True, "block": 4}, {}),
    "odd pieces": (ring_attention, 4, 52, {"block": 5}, {"documents": True}),
    "odd chunks": (ring_attention, 4, 56, {"zigzagged": True, "block": 3},
                   {"documents": True, "G": 2}),
    "blocks of one": (ring_attention, 3, 9, {"block": 1}, {"documents": True}),
    "gather": (gather_kv, 4, 64, {"block": 8}, {"documents": True}),
    "gather, zigzag": (gather_kv, 4, 56, {"zigzagged": True, "block": 3}, {"G": 2}),
    "ulysses": (ulysses, 4, 52, {"block": 5}, {"documents": True, "G": 4}),
    "one device": (ring_attention, 1, 15, {"block": 4}, {}),
}


@pytest.fixture(scope="module")
def rings():
    """Each case compiled once: its Ring and what one device finds."""
    made = {}

    def case(name):
        if name not in made:
            method, ways, T, how, data = CASES[name]
            arrays, segments = drawn(T, **data)
            made[name] = (Ring(method, ways, arrays, segments, **how),
                          expected(arrays, segments))
        return made[name]

    return case


@pytest.mark.parametrize("name", CASES)
def test_attention_and_every_gradient_are_those_of_one_device(rings, name):
    ring, right = rings(name)
    assert apart(ring.found(), right) < 1e-6


@pytest.mark.parametrize("name", CASES)
def test_every_device_makes_the_scores_of_the_formula(rings, name):
    method, ways, T, how, _ = CASES[name]
    how = {"block": 512, "zigzagged": False} | how
    scores = squares(ways, T, method=method, **how)
    assert proofs.work(rings(name)[0].program) == PRODUCTS * 2 * B * H * K * scores


def test_zigzag_does_less_than_six_percent_more_than_causal_work():
    n, T = 8, 256
    zigzag, ring, blocks = (squares(n, T, block, zigzagged, ring_attention) * n / (T * (T + 1) / 2)
                            for block, zigzagged in ((16, True), (32, False), (4, True)))
    assert zigzag == pytest.approx((2 * n + 1) * T / (2 * n * (T + 1)), rel=1e-12)
    assert round(zigzag, 3) == 1.058 and round(ring, 3) == 1.992
    assert blocks < 1.03


@pytest.mark.parametrize("name, wire", [
    ("ring", 6 * 3), ("zigzag", 6 * 3), ("zigzag in blocks", 6 * 3), ("odd pieces", 6 * 3),
    ("odd chunks", 6 * 3), ("gather", 4 * 3), ("gather, zigzag", 4 * 3), ("one device", 0)])
def test_bytes_on_the_wire_are_those_of_the_formula(rings, name, wire):
    _, ways, T, _, data = CASES[name]
    u = 4 * B * T // ways * data.get("G", 8) * K
    ring = rings(name)[0]
    assert proofs.collectives(ring.program, ring.mesh).wire("context") == wire * u


def test_ulysses_exchanges_queries_keys_values_and_results_once_in_each_direction(rings):
    ring, _ = rings("ulysses")
    u_queries, u_keys = (4 * B * 13 * heads * K for heads in (8, 4))
    proofs.assert_communicates(ring.program, ring.mesh, {
        ("all-to-all", "context"): (8, 4 * (u_queries + u_keys))})


def test_no_array_has_the_scores_of_a_shard():
    arrays, _ = drawn(128)
    program = Ring(ring_attention, 2, arrays, block=8).program.as_text()
    assert "64,64]" not in program and "f32[2,8,8,8]" in program


@pytest.mark.parametrize("wrong, message", [
    ({"method": "pipe"}, "method is one of ring, gather, ulysses; found 'pipe'"),
    ({"method": "ulysses", "zigzagged": True}, "expected them in their own order")])
def test_a_context_that_cannot_be_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Context(**wrong)


def test_groups_that_ulysses_cannot_divide_are_refused():
    arrays, _ = drawn(16, G=2)
    with pytest.raises(ValueError, match="expected a multiple of 4 groups, found 2"):
        Ring(ulysses, 4, arrays)


@pytest.mark.parametrize("ways, each, zigzagged, block, message", [
    (4, 7, True, 4, "an even number of tokens on each device, found 7"),
    (4, 8, False, 0, "a block has at least one token; found block=0")])
def test_tokens_that_cannot_be_cut_are_refused(ways, each, zigzagged, block, message):
    with pytest.raises(ValueError, match=message):
        Tokens(ways, each, zigzagged, block)


def test_it_runs_inside_a_shard_map_over_rows_and_tokens():
    arrays, _ = drawn(32)
    mesh, spec = make_mesh((2, 4), ("batch", "context")), jax.P("batch", "context")
    with jax.set_mesh(mesh):
        given = [jax.device_put(x, spec) for x in arrays[:3]]
        y = jax.jit(jax.shard_map(ring_attention, in_specs=(spec,) * 3, out_specs=spec))(*given)
    assert apart([y], expected(arrays, None)[:1]) < 1e-6


def test_zigzag_has_every_pair_that_is_seen_once():
    ways, each = 4, 12
    tokens, met = Tokens(ways, each, True, 2), np.zeros((48, 48), int)
    for me in range(ways):
        for whose in range(ways):
            pairs = tokens.own_pairs() if whose == me else tokens.pairs(me, whose)
            mine, theirs = tokens.places(me), tokens.places(whose)
            for i, j in np.asarray(pairs):
                met[np.ix_(mine[i], theirs[j])] += 1
    assert met.max() == 1 and (met[np.tril_indices(48)] == 1).all()
