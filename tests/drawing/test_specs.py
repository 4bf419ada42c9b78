"""Drawn specs: a letter has the colour of the mesh axis that its rule gives it, and no other."""
from xml.etree import ElementTree

import pytest
from jax.sharding import PartitionSpec as P

from meshbook.drawing.specs import draw_specs
from meshbook.drawing.torus import AXES
from meshbook.sharding import Sharding

TENSORS = "BTD residual stream", "BTHK attention", "DF first", "FD second", "D norms"
PRESETS = {"tensor": Sharding.tensor_parallel(), "fully": Sharding.fully_sharded()}


def drawn(picture):
    """{(preset, letters, place): {(axis, colour)}} of the boxes that are filled."""
    found = {}
    for node in ElementTree.fromstring(picture.html).iter():
        if node.get("data-letter"):
            preset, letters, place = node.get("data-letter").split()
            found.setdefault((preset, letters, int(place)), []).append(
                (node.get("data-axis"), node.get("fill")))
    return found


def test_every_letter_has_the_axis_of_its_spec():
    specs = {tensor: {preset: rules.parameter(tensor.split()[0])
                      for preset, rules in PRESETS.items()} for tensor in TENSORS}
    colours = dict(zip(("batch", "model"), AXES, strict=True))
    expected = {(preset, tensor.split()[0], place): [(axis, colours[axis])]
                for tensor, of in specs.items() for preset, spec in of.items()
                for place, axis in enumerate(spec) if axis}
    assert len(expected) > 8
    picture = draw_specs({"parameters": specs}, ("batch", "model"))
    assert drawn(picture) == expected
    assert "FD second: tensor ('model',), fully ('model', 'batch')" in picture.alt


def test_two_axes_share_the_box_of_one_letter():
    picture = draw_specs({"": {"BT": {"both": P(("batch", "model"))}}}, ("batch", "model"))
    assert [axis for axis, _ in drawn(picture)["both", "BT", 0]] == ["batch", "model"]
    widths = [float(node.get("width")) for node in ElementTree.fromstring(picture.html).iter()
              if node.get("data-letter")]
    assert widths == [7.5, 7.5]


@pytest.mark.parametrize("spec", [P("batch", None, "model"), P("stage")])
def test_a_spec_that_does_not_fit_is_refused(spec):
    with pytest.raises(ValueError, match="expected a spec of DF over batch, model; found"):
        draw_specs({"": {"DF": {"wrong": spec}}}, ("batch", "model"))


def test_columns_of_presets_stand_apart():
    specs = {"BTHK attention": {"one": P("batch"), "two": P(None, None, "model")}}
    nodes = [node for node in ElementTree.fromstring(
        draw_specs({"": specs}, ("batch", "model")).html).iter()]
    first, second = (float(node.get("x")) for node in nodes if node.text in ("one", "two"))
    assert second - first > 4 * 16 + 4  # four letters, and room
