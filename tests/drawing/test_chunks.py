"""The pictures of the loss: what is filled is the first chunk, and what is written are its sizes."""
from xml.etree import ElementTree

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

from meshbook import proofs
from meshbook.drawing import svg
from meshbook.drawing.blocks import draw_vocabulary
from meshbook.drawing.chunks import draw_chunks, draw_scores
from meshbook.models.losses import chunked_cross_entropy, obvious_cross_entropy
from meshbook.sharding import Sharding, make_mesh

OWNERS = np.repeat(np.arange(4), 2)[:, None] * np.ones((1, 4), int)
NAMES = [f"group {i}" for i in range(4)]


def nodes(picture, tag):
    return [node for node in ElementTree.fromstring(picture.html).iter() if node.tag.endswith(tag)]


def texts(picture):
    return [node.text for node in nodes(picture, "text")]


def test_tokens_of_the_first_chunk_are_filled_in_the_colour_of_their_group():
    first = np.zeros((8, 4), bool)
    first[:, 1] = True
    cells = [node for node in nodes(draw_chunks(OWNERS, {"one": first}, NAMES), "rect")][:32]
    filled = np.array([node.get("fill-opacity") == "1" for node in cells]).reshape(8, 4)
    assert np.array_equal(filled, first)
    assert [node.get("fill") for node in cells] == [
        svg.device_colour(int(owner)) for owner in OWNERS.ravel()]


def test_the_groups_that_work_in_a_turn_are_counted():
    by_examples, by_positions = np.zeros((2, 8, 4), bool)
    by_examples[0], by_positions[:, 0] = True, True
    drawing = draw_chunks(OWNERS, {"a": by_examples, "b": by_positions}, NAMES)
    assert "1 of 4 groups work" in texts(drawing) and "4 of 4 groups work" in texts(drawing)
    assert drawing.alt.count("in the first turn") == 2


def test_the_scores_have_the_sizes_of_their_arrays():
    words = " ".join(texts(draw_scores(65_536, 256, 50_304, 512)))
    for size in (4 * 65_536 * 50_304, 4 * 512 * 50_304, 4 * 256 * 50_304, 4 * 65_536 * 256):
        assert svg.size_text(size) in words


def program(loss, mesh, rows=16, window=8, embed=32, vocabulary=256):
    specs = P("batch"), P(None, "model"), P("model"), P("batch")
    shapes = (rows, window, embed), (embed, vocabulary), (vocabulary,), (rows, window)
    inputs = [jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
              for shape, dtype, spec in zip(shapes, [np.float32] * 3 + [np.int32], specs)]
    with jax.set_mesh(mesh):
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(*inputs).compile()


def test_the_vocabulary_has_the_bars_and_the_numbers_of_the_compiled_loss():
    mesh, chunks, n, embed = make_mesh((4, 2)), 4, 8, 32
    loss = lambda h, w, b, labels: chunked_cross_entropy(
        h, w, b, labels, vocabulary=256, sharding=Sharding.tensor_parallel(), chunk=n)[0]
    found = proofs.collectives(program(loss, mesh), mesh).along("model")
    bars = [words for words in texts(draw_vocabulary(n, embed, 256)) if "all-reduce" in words]
    inside = [words for words in bars if not words.startswith("after the loop")]
    per_token = [int(words.split()[-3]) for words in bars]
    assert per_token == [1, 2, embed]
    assert found.count == chunks * len(inside) + 1
    assert found.bytes == 4 * chunks * n * sum(per_token)


def test_the_vocabularys_shapes_are_those_of_a_device():
    abstract = AbstractMesh((1, 2), ("batch", "model"))
    shape = lambda spec, *sizes: str(NamedSharding(abstract, spec).shard_shape(sizes))
    words = texts(draw_vocabulary(8, 32, 256))
    assert {shape(P(None, "model"), 8, 256), shape(P(None, "model"), 32, 256)} <= set(words)
    with pytest.raises(ValueError, match="vocabulary 257 does not divide by 2"):
        draw_vocabulary(8, 32, 257)


def test_the_obvious_loop_is_refused_where_the_types_say_how_tokens_are_split():
    with pytest.raises(ValueError, match="0th dimension of all xs should be replicated"):
        program(obvious_cross_entropy, make_mesh((4, 2)))
    assert program(obvious_cross_entropy, make_mesh((4, 2), axis_types=AxisType.Auto))
