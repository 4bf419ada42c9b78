"""The figures: what is drawn is what the devices hold, and every reader can see it."""

import itertools
import re
import xml.etree.ElementTree as ElementTree

import jax.numpy as jnp
import numpy as np
import pytest
from laid_out import CUBE, MESH, put
from matplotlib import pyplot

from meshbook.drawing import figures, svg
from meshbook.drawing.figures import draw_sharding
from meshbook.hlo.liveness import live_bytes
from meshbook.profiling.traces import Record, Trace


SINE = """HloModule jit_sin, is_scheduled=true
ENTRY %main (x: f32[9]) -> f32[9] {
  %x = f32[9]{0} parameter(0), metadata={op_name="x"}
  ROOT %sine = f32[9]{0} sine(%x), metadata={op_name="jit(sin)/sin"}
}"""


def one_of_each():
    """A figure of every kind."""
    weights = {"mlp": {"w_in_DF": put((8, 16), None, "model"), "b_D": put((8,))}}
    fig, axes = pyplot.subplots()
    axes.plot([0, 1], [1, 0])
    yield figures.display(fig, "a falling line")
    yield figures.curves({"a": ([0, 1], [2, 1]), "b": ([0, 1], [1, 2])}, "x", "y", "two lines")
    yield figures.curves({"a": ([0, 1], [2, 1])}, "x", "y", "level", marks=[("bar", 1.5)])
    yield figures.bars({"slow": 2.0, "fast": 100}, "images/s", alt="bars")
    yield figures.bars({"(4, 2)": {"batch": 1.0, "model": 2.0}}, "MB", alt="parts")
    yield figures.image_grid(np.zeros((3, 4, 4, 3), np.uint8), ["a", "b", "<c>"], alt="images")
    yield figures.histogram([1, 2, 2, 5], "tokens", "stories", "lengths", marks=[("T", 4)])
    yield figures.draw_tokens(["One", " <b>", "\n"], [7, 300, 10])
    yield figures.draw_attention(["One", " <b>", "\n"], [0.75, 0.25, 0], 1)
    yield figures.draw_rows([[0, 0, 0, 1], [1, 1, -1, -1]], names={0: "One <b>"})
    run = Trace(Record(0, "dot.1 <b>", "compute", float(at), 0.5, at) for at in range(3))
    yield figures.draw_gantt(run)
    yield figures.draw_shares(run)
    yield figures.draw_buffers(live_bytes(SINE))
    yield figures.draw_batch(put((8, 4, 4, 3), "batch"), "a batch <b>")
    yield figures.draw_mesh(MESH)
    yield figures.draw_mesh(CUBE)
    yield draw_sharding(put((8, 16), "batch", "model"), "w_DF")
    yield figures.draw_values(put((4, 2), "batch"), "rows", {0.0: 3})
    yield figures.draw_weights(weights)
    steps = [("images", "(B, 32, 32, 3)"), ("head", "(B, C)")]
    yield figures.draw_flow(steps, "flow", (0, 1, "× 2"))
    names = ("A[I, J]", "B[J, K]", "C[I, K]")
    yield figures.draw_product(put((4, 4)), put((4, 4)), put((4, 4)), names, "a step")
    yield figures.side_by_side(figures.draw_mesh(MESH), draw_sharding(put(())))


FIGURES = list(one_of_each())


def test_attention_is_as_strong_as_it_is_drawn_and_sees_nothing_ahead():
    drawn = figures.draw_attention(["One", " two", " one"], [0.2, 0.5, 0.3], 2)
    assert re.findall(r'fill-opacity="([\d.]+)"', drawn._repr_html_()) == ["0.24", "0.6", "0.36"]
    assert "50% at two (token 1), 30% at one (token 2)" in drawn.alt
    with pytest.raises(ValueError, match="0 after token 1; found shape .3,., and 0.3 after it"):
        figures.draw_attention(["One", " two", " one"], [0.2, 0.5, 0.3], 1)


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.alt[:20])
def test_a_figure_is_well_formed_named_and_takes_the_colour_of_the_page(figure):
    drawn = re.findall(r"<svg.*?</svg>", figure._repr_html_(), re.S)
    for text in drawn:
        text = re.sub(r"(?<=[ <])xlink:", "", text)
        root = ElementTree.fromstring(text)
        assert root.get("role") == "img" and root.get("aria-label")
        assert root.get("viewBox") and root.get("fill") == "currentColor"
        assert "max-width" in root.get("style") and "height:auto" in root.get("style")
        assert not re.search(r"(?:fill|stroke)[:=]\"? ?(?:#000|#fff\b|black|white)\b", text)
        ids = [each.get("id") for each in root.iter() if each.get("id")]
        assert len(ids) == len(set(ids))
    assert drawn and repr(figure) == figure.alt


def test_figures_are_the_same_bytes_every_time():
    assert [each.html for each in FIGURES] == [each.html for each in one_of_each()]


def test_ids_of_two_plots_on_one_page_do_not_meet():
    plots = [each.html for each in FIGURES[:3]]
    ids = [set(re.findall(r' id="([^"]+)"', plot)) for plot in plots]
    assert all(ids) and not any(a & b for a, b in itertools.combinations(ids, 2))
    for plot, own in zip(plots, ids):
        assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', plot)) <= own


@pytest.mark.parametrize("said", [
    {"torchvision": np.float64(7.2)}, {4: 1}, ["a", "b"], np.float32(1), jnp.ones(2),
    np.arange(3), (np.int64(4),), object()])
def test_alt_text_that_has_what_python_prints_is_refused(said):
    with pytest.raises(ValueError, match="alt text is heard"):
        figures.bars({"a": 1}, "s", alt=f"Widths of crops: {said!r}")
    figures.bars({"a": 1}, "s", alt="Mesh (4, 2), P('batch', None): [8, 4] of 12, {T, D}; x[B] 7%")


@pytest.mark.parametrize("alt", ["", "  ", None])
def test_a_figure_without_alt_text_is_refused(alt):
    with pytest.raises(ValueError, match="alt text"):
        figures.bars({"a": 1}, "s", alt=alt)
    with pytest.raises(ValueError, match="alt text"):
        figures.display(pyplot.figure(), alt)


def test_display_closes_the_figure():
    fig = pyplot.figure()
    figures.display(fig, "empty")
    assert not pyplot.fignum_exists(fig.number)


# Machado, Oliveira, Fernandes 2009: how the severe forms of colour blindness see linear RGB.
SIGHT = {
    "usual": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                   [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                     [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
                   [0.004733, 0.691367, 0.303900]],
}


def lab(colour, sight):
    """CIELAB of "#rrggbb" as seen with this sight."""
    channels = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.asarray(sight) @ linear, 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    x, y, z = np.cbrt(np.array(to_xyz) @ seen / [0.9505, 1, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("palette", [svg.DEVICES, svg.KINDS])
@pytest.mark.parametrize("sight", SIGHT)
def test_devices_and_kinds_have_different_colours_for_every_eye(sight, palette):
    seen = [lab(colour, SIGHT[sight]) for colour in palette]
    apart = [np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)]
    assert min(apart) > 14, min(apart)


def contrast(one, other):
    light, dark = sorted((svg.luminance(one), svg.luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_ids_read_on_their_colours_and_lines_on_both_pages():
    assert all(contrast(svg.ink(colour), colour) >= 4.5 for colour in svg.DEVICES)
    for page in ("#ffffff", "#121212"):
        assert all(contrast(page, colour) >= 3 for colour in (*svg.SERIES, *svg.KINDS))


def test_lines_that_coincide_are_drawn_from_wide_to_narrow():
    same = {"a": ([0, 1], [2, 1]), "b": ([0, 1], [2, 1.001])}
    assert figures.line_widths(same) == [3.5, 1.5]
    assert figures.line_widths({"a": ([0, 1], [2, 1]), "b": ([0, 1], [2, 3])}) == [1.8, 1.8]


def texts(figure):
    """[(x, anchor, size, words)] of every line of text, in pixels."""
    pattern = r'<text x="([^"]+)" y="[^"]+" font-size="([^"]+)" text-anchor="([^"]+)"[^>]*>([^<]*)<'
    found = re.findall(pattern, figure.html)
    return [(float(x), anchor, float(size), words) for x, size, anchor, words in found]


def test_text_stays_inside_its_figure():
    parts = {f"all-reduce along axis {i}": 1.0 for i in range(5)}
    flow = [("embed, class token, positions", "(B, T, D) = (4096, 65, 384)"), ("head", "logits")]
    repeated = figures.draw_flow(flow, "flow", (0, 1, "12 blocks"))
    stacked = figures.bars({"here": parts}, "MB a device", alt="parts")
    for figure in (stacked, figures.draw_flow(flow, "flow"), repeated):
        width = float(re.search(r'viewBox="0 0 (\S+)', figure.html)[1])
        starts = [(x, size, words) for x, anchor, size, words in texts(figure) if anchor == "start"]
        assert starts and all(x + 0.52 * size * len(words) <= width for x, size, words in starts)


def test_images_outside_their_range_are_refused():
    with pytest.raises(ValueError, match=r"pixels in \[0, 1\]"):
        figures.image_grid(np.full((1, 2, 2, 3), 7.0), alt="x")
    with pytest.raises(ValueError, match="one title an image"):
        figures.image_grid(np.zeros((2, 2, 2, 3)), ["a"], alt="x")
