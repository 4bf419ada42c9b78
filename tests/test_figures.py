"""The figures: what is drawn is what the devices hold, and every reader can see it."""

import itertools
import re
import xml.etree.ElementTree as ElementTree

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from matplotlib import pyplot

from meshbook import drawings, figures, svg, tiles
from meshbook.figures import assert_tiles, draw_sharding
from meshbook.liveness import live_bytes
from meshbook.sharding import make_mesh
from meshbook.traces import Record, Trace

MESH = make_mesh((4, 2))
CUBE = make_mesh((2, 2, 2), ("a", "b", "c"))


def put(shape, *spec, mesh=MESH):
    return jax.device_put(np.zeros(shape, np.float32), NamedSharding(mesh, P(*spec)))


def held(array):
    """{device id: slices} read without the code under test."""
    index = lambda shard: zip(shard.index, array.shape)
    return {
        shard.device.id: tuple(slice(*part.indices(size)[:2]) for part, size in index(shard))
        for shard in array.addressable_shards
    }


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
    yield figures.draw_buffers(live_bytes(jax.jit(jax.numpy.sin).lower(np.ones(9)).compile()))
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


SHARDINGS = [
    put(()), put((8,)), put((8,), "batch"), put((8,), ("batch", "model")), put((8, 4), "batch"),
    put((8, 4), None, "model"), put((8, 4), "model", "batch"),
    put((4, 2, 8), "batch", None, "model"), put((128, 32, 32, 3), "batch"),
    put((6, 3, 2, 5), None, None, "model"),
    put((2, 3, 4, 5, 8), "model", None, None, None, "batch"),
    put((2, 2, 2, 3), "a", "b", "c", mesh=CUBE), put((0, 4)),
    jax.numpy.zeros((3, 5)), put((2, 3, 2, 1, 2, 3), "c", None, "a", None, "b", mesh=CUBE),
]


@pytest.mark.parametrize("array", SHARDINGS, ids=lambda array: str(jax.typeof(array)))
def test_the_tiles_are_the_shards(array):
    drawing = draw_sharding(array)
    assert drawing.tiles == held(array)
    assert_tiles(drawing, array)
    assert_tiles(drawing, array, np.zeros(array.shape))


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_the_tiles_are_the_shards_of_any_layout(data):
    rank = data.draw(st.integers(0, 5))
    names = data.draw(st.permutations(["a", "b", "c", None, None]))[:rank]
    shape = [data.draw(st.integers(1, 3)) * (2 if name else 1) for name in names]
    array = put(tuple(shape), *names, mesh=CUBE)
    assert draw_sharding(array, "x").tiles == held(array)


def boxes(drawing):
    """{index: (x, y, right, bottom)} of the filled tiles, in pixels."""
    sides = " ".join(f'{side}="([^"]+)"' for side in ("x", "y", "width", "height"))
    pattern = f'<rect {sides}[^>]*data-index="([^"]+)"'
    found = re.findall(pattern, drawing.html)
    return {
        index: (float(x), float(y), float(x) + float(w), float(y) + float(h))
        for x, y, w, h, index in found
    }


@pytest.mark.parametrize("array", [put((8, 4), "batch", "model"), put((8,), ("batch", "model")),
                                   put((2, 2, 2, 3), "a", "b", "c", mesh=CUBE),
                                   put((4, 3, 8), "batch", None, "model")],
                         ids=lambda array: str(jax.typeof(array)))
def test_tiles_lie_where_their_index_says_and_do_not_overlap(array):
    placed = boxes(draw_sharding(array))
    assert len(placed) == 8
    for (_, a), (_, b) in itertools.combinations(placed.items(), 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
    if array.ndim == 2:  # further down the rows is further down the page, columns to the right
        at = [(drawings.parse_index(index), box) for index, box in placed.items()]
        for ((row, column), one), ((down, right), other) in itertools.permutations(at, 2):
            assert down.stop > row.start or other[3] <= one[1]
            assert right.stop > column.start or other[2] <= one[0]


def test_a_batch_is_drawn_as_its_devices_hold_it():
    images_BHWC = np.random.default_rng(0).integers(0, 256, (8, 4, 4, 3), np.uint8)
    batch = jax.device_put(images_BHWC, NamedSharding(MESH, P(("batch", "model"))))
    for array in (batch, jax.device_put(images_BHWC, NamedSharding(MESH, P("batch")))):
        drawing = figures.draw_batch(array, "images")
        figures.assert_tiles(drawing, array)
        parts = re.split('data-device="(?=[0-9])', drawing.html)
        at = [figures.png(image) for image in images_BHWC]
        found = [at.index(href) for href in re.findall(r'href="([^"]+)"', drawing.html)]
        assert found == list(range(8)) and len(parts) == 9
    second = at[held(batch)[1][0].start]
    assert re.split('data-device="', figures.draw_batch(batch, "images").html)[2].count(second) == 1


def test_a_wrong_tile_is_found_and_named():
    array = put((8, 4), "batch", "model")
    right = draw_sharding(array)
    faults = {
        "another array": draw_sharding(put((8, 4), "batch")),
        "exchanged": draw_sharding(put((8, 4), "batch", "model", mesh=Mesh(
            MESH.devices[::-1], ("batch", "model"), axis_types=MESH.axis_types))),
        "an edited index": drawings.Drawing(right.html.replace("2:4,2:4", "2:4,0:4"), right.alt),
    }
    for fault in faults.values():
        with pytest.raises(AssertionError, match=r"device \d holds \[.*\], drawn \["):
            assert_tiles(fault, array)
    recoloured = right.html.replace(svg.device_colour(5), svg.device_colour(4))
    with pytest.raises(AssertionError, match="device 5 has the colour"):
        assert_tiles(drawings.Drawing(recoloured, right.alt), array)
    on_one = draw_sharding(jax.numpy.zeros((8, 4)))
    with pytest.raises(AssertionError, match="expected devices"):
        assert_tiles(on_one, array)


def test_a_drawing_from_wrong_indices_does_not_pass_for_the_data(monkeypatch):
    """The indices that shards report are what is drawn; the data on the devices are not asked."""
    array = put((8, 4), "batch", "model")  # all zeros: no slice of it differs from another
    swapped = {tile: list(reversed(devices)) for tile, devices in zip(
        tiles.tiles_of(array), reversed(tiles.tiles_of(array).values()), strict=True)}
    monkeypatch.setattr(drawings, "tiles_of", lambda array: swapped)
    with pytest.raises(AssertionError, match=r"device \d holds \[.*\], drawn \["):
        assert_tiles(draw_sharding(array), array)


def test_a_shard_with_other_data_is_found():
    whole = np.arange(32, dtype=np.float32).reshape(8, 4)
    sharding = NamedSharding(MESH, P("batch", "model"))
    array = jax.device_put(whole, sharding)
    assert_tiles(draw_sharding(array), array, whole)
    pieces = [shard.data for shard in array.addressable_shards]
    pieces[3] = pieces[3] + 1
    spoiled = jax.make_array_from_single_device_arrays(whole.shape, sharding, pieces)
    assert_tiles(draw_sharding(spoiled), spoiled)
    with pytest.raises(AssertionError, match=r"device 3 holds other data than \[2:4,2:4\]"):
        assert_tiles(draw_sharding(spoiled), spoiled, whole)


def test_replicated_tiles_show_every_copy():
    drawing = draw_sharding(put((8, 4), None, "model"))
    assert drawing.html.count("<circle") == 8 and "each device holds (8, 2)" in drawing.html




def test_uneven_tiles_and_many_devices_are_drawn():
    uneven = {((0, 3), (0, 5)): [0], ((3, 4), (0, 5)): [1]}
    drawn, width, height = drawings.panel((4, 5), uneven, "")
    first, second = (box for _, box in sorted(boxes(drawings.Drawing(drawn, "x")).items()))
    assert (first[3] - first[1]) == pytest.approx(3 * (second[3] - second[1]), rel=1e-3)
    many = {((0, 8),): list(range(64))}
    drawn, _, _ = drawings.panel((8,), many, "")
    assert len(drawings.drawn_tiles(drawn)) == 64


def test_random_keys_are_drawn_and_partial_sums_refused():
    keys = jax.random.split(jax.random.key(0), 8)
    on_mesh = jax.device_put(keys, NamedSharding(MESH, P("batch")))
    assert draw_sharding(on_mesh).tiles[7] == (slice(6, 8),)
    product = lambda a, b: jax.numpy.einsum("ij,jk->ik", a, b, out_sharding=P(unreduced={"model"}))
    with jax.set_mesh(MESH):
        partial = jax.jit(product)(put((4, 4), None, "model"), put((4, 4), "model"))
    with pytest.raises(ValueError, match="a sum that is not finished"):
        draw_sharding(partial)


def test_what_has_no_shards_is_refused():
    for thing in (np.zeros(3), jax.ShapeDtypeStruct((2,), np.float32), "x"):
        with pytest.raises(TypeError, match="expected a jax.Array"):
            draw_sharding(thing)
    with pytest.raises(TypeError, match="expected a jax.Array"):
        jax.jit(lambda x: draw_sharding(x) and x)(np.zeros(3))


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


@pytest.mark.parametrize("sight", SIGHT)
def test_eight_devices_have_eight_colours_for_every_eye(sight):
    seen = [lab(colour, SIGHT[sight]) for colour in svg.DEVICES]
    apart = [np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)]
    assert min(apart) > 14, min(apart)


def contrast(one, other):
    light, dark = sorted((svg.luminance(one), svg.luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_ids_read_on_their_colours_and_lines_on_both_pages():
    assert all(contrast(svg.ink(colour), colour) >= 4.5 for colour in svg.DEVICES)
    for page in ("#ffffff", "#121212"):
        assert all(contrast(page, colour) >= 3 for colour in svg.SERIES)


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
