"""The block under tensor parallelism: what is drawn is what the rules and the formulas say."""
from xml.etree import ElementTree

import pytest
from jax.sharding import AbstractMesh, NamedSharding

from meshbook.costs.plans import Plan
from meshbook.costs.step import describe
from meshbook.costs.traffic import step_traffic
from meshbook.drawing.blocks import draw_block, draw_gradient_sums
from meshbook.models import ViTConfig
from meshbook.sharding import Sharding

MESH = AbstractMesh((4, 2), ("batch", "model"))
CONFIG = ViTConfig(patch=8, embed=64, hidden=256, heads=8, layers=3)
EXAMPLES = 32


def drawn():
    c = CONFIG
    return draw_block(EXAMPLES // 4, c.tokens, c.embed, c.hidden, c.heads)


def labels():
    return [node.text for node in ElementTree.fromstring(drawn().html).iter()
            if node.tag.endswith("text")]


def test_shapes_are_those_that_the_rules_give_a_device():
    c, rules = CONFIG, Sharding.tensor_parallel()
    arrays = {"BTD": (EXAMPLES, c.tokens, c.embed), "BTF": (EXAMPLES, c.tokens, c.hidden),
              "BTHK": (EXAMPLES, c.tokens, c.heads, c.head_size)}
    expected = {str(NamedSharding(MESH, rules.activation(letters)).shard_shape(shape))
                for letters, shape in arrays.items()}
    assert {label for label in labels() if label.startswith("(")} == expected


def test_heads_and_hidden_units_are_divided_without_a_gap():
    ranges = [label.rpartition(" ")[2] for label in labels() if "–" in label]
    assert ranges == 2 * ["0–3", "4–7"] + ["0–127", "128–255"]


def test_the_block_has_as_many_all_reduces_as_the_formula_counts():
    bars = [label for label in labels() if "all-reduce" in label]
    step = describe(CONFIG, Plan(**MESH.shape, rules="tensor_parallel"), EXAMPLES)
    (traffic,) = (moved for (_, axes), moved in step_traffic(step).items() if axes == ("model",))
    assert len(bars) == traffic.count / CONFIG.layers == 4
    assert [bar.partition(":")[0] for bar in bars] == 2 * ["backward", "forward"]


@pytest.mark.parametrize("sizes, words", [
    ((8, 17, 63, 128, 3), "heads 3 does not divide by 2"),
    ((8, 17, 64, 127, 4), "hidden 127 does not divide by 2"),
    ((8, 17, 66, 128, 4), "embed 66 does not divide by 4")])
def test_sizes_that_two_devices_cannot_share_are_refused(sizes, words):
    with pytest.raises(ValueError, match=words):
        draw_block(*sizes)


def test_it_is_told_in_words_too():
    assert "forward: all-reduce the output" in drawn().alt and "heads 4–7" in drawn().alt


def kinds_of(picture):
    """The rows of a drawing from top to bottom: the words of a bar, or of the first device's box."""
    nodes = [node for node in ElementTree.fromstring(picture.html).iter()
             if node.tag.endswith("text") and not node.text.startswith("(")]
    rows = {float(node.get("y")): node.text for node in reversed(nodes)}
    return [words for y, words in sorted(rows.items()) if y > 28]


@pytest.mark.parametrize("waits, count", [(False, 3), (True, 1)])
def test_gradients_that_wait_are_summed_once(waits, count):
    rows = kinds_of(draw_gradient_sums(2, 16, waits))
    assert sum("all-reduce" in words for words in rows) == count
    assert sum(words.endswith("gradient") for words in rows) == 3
    assert "all-reduce" in rows[-2] and rows[-1] == "the gradient of x"
    assert ("all-reduce" in rows[1]) != waits
