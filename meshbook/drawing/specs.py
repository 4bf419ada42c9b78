"""Sharding rules on tensors: every letter in the colour of the mesh axis that splits it."""

from collections.abc import Mapping

from jax.sharding import PartitionSpec

from meshbook.drawing import svg
from meshbook.drawing.torus import AXES
from meshbook.sharding import axes_of

BOX, PITCH, LEFT, GAP = 16.0, 19.0, 106.0, 8.0  # pixels
Specs = Mapping[str, Mapping[str, PartitionSpec]]


def draw_specs(groups: Mapping[str, Specs], axes: tuple[str, str]):
    """Draw the specs of tensors {group: {"BTF hidden units": {preset: spec}}}, a column per preset.

    The first word of a tensor is its letters, the rest says what it is. axes: of the mesh; a letter
    that one of them splits has its colour, any other letter is an outline. Raises ValueError for a
    spec that is longer than the letters or names another axis.
    """
    colours = dict(zip(axes, AXES, strict=True))
    rows = [(tensor, specs) for of in groups.values() for tensor, specs in of.items()]
    presets = list(dict.fromkeys(preset for _, specs in rows for preset in specs))
    wide = {preset: max(_width(tensor) for tensor, specs in rows if preset in specs)
            for preset in presets}
    at, x = {}, LEFT
    for preset in presets:
        at[preset], x = x, x + max(wide[preset], svg.text_width(preset, 11)) + GAP
    key = {f"split over {axis}": colour for axis, colour in colours.items()}
    body, y = svg.key(key, x)
    body += [svg.text(at[preset], y + 8, preset, 11, "start", font_weight="600")
             for preset in presets]
    told, y = [], y + 16
    for group, of in groups.items():
        body.append(svg.text(0, y + 11, group, 11, "start", font_weight="600"))
        y += PITCH
        for tensor, specs in of.items():
            letters, _, words = tensor.partition(" ")
            body.append(svg.text(0, y + 12, words, 10.5, "start"))
            for preset, spec in specs.items():
                _check(letters, spec, colours)
                body += _letters(at[preset], y, letters, spec, colours, preset)
            told.append(f"{tensor}: " + ", ".join(
                f"{preset} {tuple(spec)}" for preset, spec in specs.items()))
            y += PITCH
        y += 6
    return svg.picture("".join(body), x - GAP, y - 6, ". ".join(told), shown=1.2 * (x - GAP))


def _width(tensor):
    return BOX * len(tensor.partition(" ")[0])


def _check(letters, spec, colours):
    used = {axis for rule in spec for axis in axes_of(rule)}
    if len(spec) > len(letters) or used - colours.keys():
        raise ValueError(f"expected a spec of {letters} over {', '.join(colours)}; found {spec}")


def _letters(x, y, letters, spec, colours, preset):
    """The letters of one tensor, each in a box that the axes of its rule fill."""
    for place, letter in enumerate(letters):
        axes = axes_of(spec[place]) if place < len(spec) else ()
        left = x + BOX * place
        for part, axis in enumerate(axes):
            width = (BOX - 1) / len(axes)
            yield svg.rectangle(left + width * part, y, width, BOX - 1, fill=colours[axis],
                                data_axis=axis, data_letter=f"{preset} {letters} {place}")
        yield svg.rectangle(left, y, BOX - 1, BOX - 1, stroke="currentColor", stroke_opacity=0.4)
        ink = svg.ink(colours[axes[0]]) if axes else "currentColor"
        yield svg.text(left + (BOX - 1) / 2, y + 11.5, letter, 10.5, fill=ink,
                       font_weight="600" if axes else "400")
