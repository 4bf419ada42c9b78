"""Collectives in steps: they end as JAX's do, send what `wire_bytes` says, and are drawn so."""
from xml.etree import ElementTree

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshbook.drawing import svg
from meshbook.drawing.collective_states import results, sent_pieces, steps_of
from meshbook.drawing.collective_steps import COSTS, draw_collective
from meshbook.hlo.collectives import collectives
from meshbook.hlo.wire import wire_bytes
from meshbook.sharding import make_mesh

RANDOM = np.random.default_rng(0).integers(0, 100, (4, 4)).astype(np.float32)
RING = [(at, (at + 1) % 4) for at in range(4)]
TILED = {"axis_name": "batch", "tiled": True}
IN_JAX = {
    "all-reduce": lambda row: jax.lax.psum(row, "batch"),
    "all-gather": lambda row: jax.lax.all_gather(row, axis=1, **TILED),
    "reduce-scatter": lambda row: jax.lax.psum_scatter(row, scatter_dimension=1, **TILED),
    "all-to-all": lambda row: jax.lax.all_to_all(row, split_axis=1, concat_axis=1, **TILED),
    "collective-permute": lambda row: jax.lax.ppermute(row, "batch", RING),
}


def numbers_for(kind, rows=RANDOM):
    return (rows[:, :1] if kind == "all-gather" else rows).tolist()


def run(kind):
    """What JAX leaves on four devices, and what its program moves."""
    mesh = make_mesh((4,), ("batch",))
    split = jax.sharding.NamedSharding(mesh, P("batch"))
    rows = jax.device_put(np.array(numbers_for(kind), np.float32), split)
    mapped = jax.jit(jax.shard_map(IN_JAX[kind], mesh=mesh, in_specs=P("batch"),
                                   out_specs=P() if kind == "all-reduce" else P("batch")))
    shards = sorted(mapped(rows).addressable_shards, key=lambda shard: shard.device.id)
    return ([np.ravel(shard.data).tolist() for shard in shards],
            collectives(mapped.lower(rows).compile(), mesh))


@pytest.mark.parametrize("kind", COSTS)
def test_the_last_step_is_what_jax_computes_and_the_bytes_are_those_of_its_program(kind):
    steps = steps_of(kind, numbers_for(kind))
    held, moved = run(kind)
    assert results(steps) == held
    (found,), sent = moved.values(), {at: 4 * count for at, count in sent_pieces(steps).items()}
    assert found.bytes == 4 * len(held[0]) and moved.along("batch", kind=kind) == found
    assert sent == dict.fromkeys(range(4), moved.wire("batch"))


@pytest.mark.parametrize("k", [2, 8])
@pytest.mark.parametrize("kind", COSTS)
def test_the_bytes_are_right_for_other_groups_too(kind, k):
    steps = steps_of(kind, numbers_for(kind, np.ones((k, k), np.float32)))
    result = len(results(steps)[0])
    assert set(sent_pieces(steps).values()) == {wire_bytes(kind, k, result)}
    if kind in ("all-reduce", "reduce-scatter"):
        assert {piece.value for row in steps[-1].held for piece in row if piece} == {k}
    formula = COSTS[kind].replace("2n", "2*n").replace("n(", "n*(").replace("−", "-")
    assert eval(formula, {"n": result, "k": k}) == wire_bytes(kind, k, result)


@pytest.mark.parametrize("kind", COSTS)
def test_a_number_is_the_sum_of_those_whose_devices_it_names_and_was_sent_to_where_it_arrived(kind):
    steps, rows = steps_of(kind, numbers_for(kind)), RANDOM
    for before, step in zip(steps, steps[1:]):
        for slot, row in enumerate(zip(*step.held)):
            for piece in filter(None, row):
                if kind in ("all-reduce", "reduce-scatter"):
                    assert piece.value == sum(rows[origin, slot] for origin in piece.origins)
        for each in step.sends:
            sent = before.held[each.source][each.slot]
            assert sent.origins <= step.held[each.target][each.to].origins
            if kind != "all-to-all":
                assert each.target == (each.source + 1) % 4  # a ring: to the next one only


def test_what_cannot_be_stepped_through_is_refused():
    with pytest.raises(ValueError, match="expected one of all-reduce.*found 'broadcast'"):
        steps_of("broadcast", [[1]])
    with pytest.raises(ValueError, match=r"on 2 devices expected rows of 2 numbers; found \[3\]"):
        steps_of("all-reduce", [[1, 2, 3]] * 2)
    with pytest.raises(ValueError, match="expected a power of two; found 3 devices"):
        steps_of("all-to-all", [[1, 2, 3]] * 3)


@pytest.mark.parametrize("kind", COSTS)
def test_the_picture_shows_every_step_with_its_numbers_their_origins_and_what_arrived(kind):
    numbers = numbers_for(kind)
    steps, drawing = steps_of(kind, numbers), draw_collective(kind, numbers)
    root = ElementTree.fromstring(drawing.html.replace("<br>", "<br/>"))
    pictures = root.findall(".//{http://www.w3.org/2000/svg}svg")
    assert len(pictures) == len(steps)
    for picture, step in zip(pictures, steps):
        drawn, arrived = {}, set()
        for node in picture.iter("{http://www.w3.org/2000/svg}g"):
            place = int(node.get("data-device")), int(node.get("data-slot"))
            origins = {int(each) for each in node.get("data-origins").split(",")}
            drawn[place] = float(node.get("data-value")), origins
            fills = {each.get("fill") for each in node} - {None, "none"}
            assert {svg.device_colour(each) for each in origins} <= fills
            assert not fills & {svg.device_colour(each) for each in {*range(4)} - origins}
            if node.get("class") == "collective-arrived":
                arrived.add(place)
        assert drawn == {(device, slot): (piece.value, piece.origins)
                         for device, row in enumerate(step.held)
                         for slot, piece in enumerate(row) if piece}
        assert arrived == {(each.target, each.to) for each in step.sends}
    sent = 4 * sent_pieces(steps)[0]
    assert f"Each device sends {sent} bytes" in drawing.alt
    assert f": {sent} bytes sent" in drawing.html and drawing.html == draw_collective(
        kind, numbers).html


def test_what_has_just_come_has_an_outline():
    picture = draw_collective("collective-permute", numbers_for("collective-permute"))
    root = ElementTree.fromstring(picture.html.replace("<br>", "<br/>"))
    slots = [node for node in root.iter() if node.get("data-slot")]
    came = [any(child.get("stroke-width") == "2" for child in node.iter()) for node in slots]
    assert any(came) and not all(came)
