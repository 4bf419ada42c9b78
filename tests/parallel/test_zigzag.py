"""The order of zigzag, batches in it, and batches filled up."""
import numpy as np
import pytest

from meshbook.parallel.zigzag import filled_up, zigzag, zigzag_order


def test_each_device_has_a_chunk_from_the_front_and_its_mirror_from_the_back():
    order = zigzag_order(16, 4).reshape(4, 2, 2)
    assert order[0].tolist() == [[0, 1], [14, 15]] and order[3].tolist() == [[6, 7], [8, 9]]
    assert sorted(order.ravel()) == list(range(16))


def test_a_batch_in_zigzag_order_keeps_every_token_beside_its_label_and_place():
    rows = np.arange(32).reshape(2, 16)
    batch = {"inputs": rows, "labels": rows + 1, "segments": rows // 5, "weight": rows / 1.0}
    found = zigzag(batch, 2)
    np.testing.assert_array_equal(found["labels"], found["inputs"] + 1)
    np.testing.assert_array_equal(found["segments"], found["inputs"] // 5)
    np.testing.assert_array_equal(found["weight"], found["inputs"])
    np.testing.assert_array_equal(found["positions"], found["inputs"] % 16)


def test_positions_of_documents_are_kept():
    rows = np.zeros((1, 8), int)
    found = zigzag({"inputs": rows, "positions": np.array([[0, 1, 2, 0, 1, 2, 3, 0]])}, 2)
    assert found["positions"].tolist() == [[0, 1, 3, 0, 2, 0, 1, 2]]


@pytest.mark.parametrize("tokens, ways", [(36, 8), (7, 1), (8, 0)])
def test_tokens_that_zigzag_cannot_divide_are_refused(tokens, ways):
    with pytest.raises(ValueError, match=f"a multiple of {2 * ways} tokens, found {tokens}"):
        zigzag_order(tokens, ways)


def test_filling_counts_for_nothing_and_has_a_document_of_its_own():
    rows = np.arange(10).reshape(2, 5)
    found = filled_up({"inputs": rows, "labels": rows, "segments": rows // 9}, 4)
    assert {x.shape for x in found.values()} == {(2, 8)}
    assert found["weight"].sum() == 10 and (found["weight"][:, 5:] == 0).all()
    assert (found["segments"][:, 5:] == -1).all() and (found["inputs"][:, :5] == rows).all()
    assert filled_up(found, 4)["inputs"].shape == (2, 8)
