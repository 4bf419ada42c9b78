"""Pictures of loading: bands as thick as their bytes, cells of those who load them, weights."""
from xml.etree import ElementTree

import numpy as np
import pytest

from meshbook.data import images
from meshbook.data.augmentation import two_taps
from meshbook.data.order import epoch_order
from meshbook.drawing import svg
from meshbook.drawing.loading import Pipeline, Strip, draw_order, draw_pipelines, draw_taps

PIPELINES = {"slow": Pipeline(["read", "crop", "stack"], ["step"], crossing=4000, each=2),
             "fast": Pipeline(["gather"], ["crop", "step"], crossing=1000)}


def nodes(picture, attribute=None):
    """The elements of a picture, or those of them with an attribute."""
    found = ElementTree.fromstring(picture.html).iter()
    return [node for node in found if attribute is None or attribute in node.attrib]


def words(picture):
    return [node.text for node in nodes(picture) if node.tag.endswith("text")]


def test_a_band_is_as_thick_as_its_bytes():
    slow, fast = nodes(draw_pipelines(PIPELINES, 128), "data-bytes")
    assert (slow.get("data-bytes"), fast.get("data-bytes")) == ("4000", "1000")
    assert float(slow.get("height")) == 4 * float(fast.get("height"))


def test_steps_of_each_image_are_cards_and_say_how_many():
    drawn = draw_pipelines(PIPELINES, 128)
    assert words(drawn).count("× 128") == 1  # of the slow one alone
    assert len([node for node in nodes(drawn) if node.tag.endswith("polyline")]) == 2 * 2
    assert "slow: the host does read, crop, stack; 4.0 kB cross to the device" in drawn.alt


def test_a_pipeline_without_a_step_on_a_side_is_refused():
    with pytest.raises(ValueError, match="slow: expected steps on the host and on the device"):
        draw_pipelines({"slow": Pipeline(["read"], [], crossing=1)}, 8)


def test_cells_are_those_that_each_process_loads():
    tiny = images.Images(np.zeros((20, 1, 1, 3), np.uint8), np.arange(20))
    shares = [np.concatenate([batch["labels"] for batch in images.batches(
        tiny, 8, 3, epochs=1, process_index=index, process_count=2)]) for index in range(2)]
    order = epoch_order(20, 3, 0).tolist()
    owners = [next((who for who in range(2) if each in shares[who]), -1) for each in order]
    drawn = draw_order({"an epoch": Strip(order, owners, first=4)}, 8, ["one", "two"], "left out")
    assert [int(node.get("data-owner")) for node in nodes(drawn, "data-owner")] == owners[:16]
    assert owners == [0] * 4 + [1] * 4 + [0] * 4 + [1] * 4 + [-1] * 4
    told = words(drawn)
    assert [each for each in told if each in ("batch 4", "batch 5", "batch 6", "left out")] == [
        "batch 4", "batch 5", "left out"]
    assert [int(each) for each in told if each.isdigit()] == order
    assert f"two has {', '.join(map(str, order[4:8] + order[12:16]))}" in drawn.alt


def test_a_gap_stands_between_batches():
    drawn = draw_order({"a": Strip(range(6), [0] * 6)}, 3, ["all"], "none")
    left = [float(node.get("x")) for node in nodes(drawn, "data-owner")]
    steps = np.diff(left)
    assert steps[2] == steps[0] + 8 and len(set(np.delete(steps, 2))) == 1


def test_cells_are_wider_than_their_numbers():
    for last in (9, 99, 999):
        drawn = draw_order({"a": Strip([0, last], [0, 0])}, 2, ["all"], "none")
        wide = float(nodes(drawn, "data-owner")[0].get("width"))
        assert wide >= svg.text_width(str(last), 10.5) and wide >= 18


@pytest.mark.parametrize("owners", [[0, 0], [0, 0, 2]])
def test_a_strip_without_an_owner_or_a_name_for_each_is_refused(owners):
    with pytest.raises(ValueError, match="a: expected one owner of .* for each of 3 examples"):
        draw_order({"a": Strip([4, 5, 6], owners)}, 2, ["one", "two"], "none")


def test_lines_of_taps_are_as_thick_as_their_weights_and_sum_to_the_new_pixel():
    low, high, weight = map(np.asarray, two_taps(0.0, 6.0, 8))
    drawn = draw_taps(6, low, high, weight)
    lines = nodes(drawn, "data-share")
    shares = [float(node.get("data-share")) for node in lines]
    widths = [float(node.get("stroke-width")) for node in lines]
    np.testing.assert_allclose(widths, np.multiply(5, shares), atol=0.03)  # both are rounded
    old = sorted({float(node.get("x1")) for node in lines})
    new = sorted({float(node.get("x2")) for node in lines})
    mixing = np.zeros((8, 6))
    for node, share in zip(lines, shares):
        mixing[new.index(float(node.get("x2"))), old.index(float(node.get("x1")))] = share
    pixels = np.array([3.0, 1, 4, 1, 5, 9])
    expected = pixels[low] * (1 - weight) + pixels[high] * weight
    np.testing.assert_allclose(mixing @ pixels, expected, atol=0.1)
