"""Chapter 9's instruments: the stages of a program are read as they are, and drawn so."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from meshbook.drawing import lowering, svg
from meshbook.hlo import module
from meshbook.sharding import make_mesh

MESH = make_mesh((4, 2))
B, D, F = 32, 64, 256


def mlp(x_BD, w_DF, w_FD):
    with jax.named_scope("up"):
        h_BF = jax.nn.gelu(x_BD @ w_DF)
    with jax.named_scope("down"):
        return jnp.einsum("BF,FD->BD", h_BF, w_FD, out_sharding=P("batch"))


def three_stages(function, *arguments):
    with jax.set_mesh(MESH):
        lowered = jax.jit(function).lower(*arguments)
        return jax.make_jaxpr(function)(*arguments), lowered, lowered.compile()


def put(*spec, shape):
    return jax.device_put(jnp.ones(shape), NamedSharding(MESH, P(*spec)))


@pytest.fixture(scope="module")
def followed():
    return three_stages(mlp, put("batch", shape=(B, D)), put(None, "model", shape=(D, F)),
                        put("model", shape=(F, D)))


def counts(stage):
    kinds = [each.kind for each in lowering.operations(stage)]
    return {kind: kinds.count(kind) for kind in lowering.KINDS if kind in kinds}


def test_the_matmuls_stay_and_the_collective_comes_with_the_compiler(followed):
    jaxpr, lowered, compiled = map(counts, followed)
    assert [each["matmul"] for each in (jaxpr, lowered, compiled)] == [2, 2, 2]
    assert "collective" not in jaxpr and "collective" not in lowered
    assert compiled["collective"] == 1 and lowered["shape or sharding"] > jaxpr.get(
        "shape or sharding", 0)


def test_sizes_are_whole_until_the_compiler_cuts_them(followed):
    jaxpr, lowered, compiled = ([each.dims for each in lowering.operations(stage)
                                 if each.kind == "matmul"] for stage in followed)
    assert jaxpr == lowered == [(B, F), (B, D)]
    assert compiled == [(B // 4, F // 2), (B // 4, D)]


def test_every_equation_and_every_statement_is_one_operation(followed):
    jaxpr, lowered, _ = followed
    assert [each.name for each in lowering.operations(jaxpr)] == [
        equation.primitive.name for equation in jaxpr.jaxpr.eqns]
    (main,) = [each for each in lowered.compiler_ir("stablehlo").body.operations
               if each.operation.name == "func.func"]
    names = [each.operation.name.partition(".")[2] for each in main.regions[0].blocks[0].operations]
    assert [each.name for each in lowering.operations(lowered)] == [
        name for name in names if name not in ("constant", "return")]


def test_calls_are_looked_into():
    once = jax.make_jaxpr(jax.jit(lambda x: jnp.sin(jnp.cos(x))))(1.0)
    assert [each.name for each in lowering.operations(once)] == ["cos", "sin"]
    relu = jax.make_jaxpr(jax.nn.relu)(1.0)
    assert [each.name for each in lowering.operations(relu)] == ["max"]


def test_a_fusion_says_how_much_is_in_it(followed):
    labels = [each.label for each in lowering.operations(followed[2])]
    assert labels[0] == labels[2] == "dot" and labels[3] == "all-reduce"
    size = int(re.fullmatch(r"fusion of (\d+)", labels[1])[1])
    other = [each for each in lowering.operations(followed[0]) if each.kind == "other computing"]
    assert size >= len(other)


def test_operations_lead_back_to_their_scopes(followed):
    source = lowering.sources(followed[2])
    ran = lowering.operations(followed[2])
    assert [re.search("up|down", source[each.name])[0] for each in ran] == [
        "up", "up", "down", "down"]
    assert [source[each.name] for each in ran] == [each.source for each in ran]
    assert source == lowering.sources(followed[2].as_text())


def test_a_listing_has_the_program_and_nothing_for_tools(followed):
    jaxpr, lowered, compiled = map(lowering.listing, followed)
    assert "\x1b" not in jaxpr and "dot_general" in jaxpr
    assert lowered.count("stablehlo.dot_general") == 2
    for words in ("metadata", "backend_config", "op_name", "FileNames", __file__):
        assert words not in compiled
    assert followed[2].as_text().count("metadata=") > 4
    whole, short = module.parse(followed[2]), module.parse(compiled)
    strip = lambda program: {
        name: [(each.name, each.opcode, each.operands, each.shape)
               for each in body.instructions.values()]
        for name, body in program.computations.items()}
    assert strip(short) == strip(whole)


def test_attributes_with_brackets_and_quotes_in_them_are_left_out_whole():
    line = ('  %a = f32[2]{0} add(%x, %y), metadata={op_name="jit(f)/}{\\"/add" line=3}, '
            'dimensions={0}, backend_config={"a":{"b":"}"},"c":[]}')
    assert lowering._without_tools(line) == "  %a = f32[2]{0} add(%x, %y), dimensions={0}"


@pytest.mark.parametrize("thing", [mlp, "HloModule x", None, 3])
def test_what_is_no_stage_is_refused(thing):
    with pytest.raises(TypeError, match="expected a jaxpr, a lowered program or a compiled one"):
        lowering.operations(thing)


def boxes(drawing):
    """The kinds of the boxes, row by row."""
    found = re.findall(r'<rect x="[^"]*" y="([^"]*)"[^>]* data-kind="([^"]*)"', drawing.html)
    rows = {}
    for y, kind in found:
        rows.setdefault(float(y), []).append(kind)
    return [rows[y] for y in sorted(rows)]


def test_each_box_is_an_operation_in_its_place(followed):
    drawing = lowering.draw_stages(*followed, MESH)
    assert boxes(drawing) == [[each.kind for each in lowering.operations(stage)]
                              for stage in followed]
    for stage in followed:
        assert f"{len(lowering.operations(stage))} operations" in drawing.alt
    assert "8 × 128" in drawing.alt and "32 × 256" in drawing.alt


def test_devices_that_meet_are_joined(followed):
    drawing = lowering.draw_stages(*followed, MESH)
    places = [float(x) for x in re.findall(r'<path d="M([\d.]+) ', drawing.html)]
    spans = [float(x) for x in re.findall(r'<path d="M[^"]*q\S+ 26 ([\d.]+) 0"', drawing.html)]
    pitch = lowering.WIDE / 8
    assert places == pytest.approx([pitch * (at + 0.5) for at in (0, 2, 4, 6)])
    assert spans == pytest.approx([pitch] * 4)
    assert all(svg.device_colour(device) in drawing.html for device in range(8))
    alone = three_stages(jnp.sin, put("batch", shape=(B, D)))
    assert "<path" not in lowering.draw_stages(*alone, MESH).html


def test_words_read_on_their_boxes_and_stay_inside(followed):
    html = lowering.draw_stages(*followed, MESH).html
    for label in ("dot", "all-reduce"):
        kind = next(each.kind for each in lowering.operations(followed[2]) if each.label == label)
        (fill,) = set(re.findall(rf'fill="(#\w+)">{label}<', html))
        light, dark = sorted((svg.luminance(fill), svg.luminance(lowering.KINDS[kind])))[::-1]
        assert (light + 0.05) / (dark + 0.05) >= 4.5
    width = float(re.search(r'viewBox="0 0 (\S+)', html)[1])
    texts = re.findall(r'<text x="([^"]+)" y="[^"]+" font-size="([^"]+)" '
                       r'text-anchor="(\w+)"[^>]*>([^<]*)<', html)
    assert all(float(x) + 0.56 * float(size) * len(words) <= width
               for x, size, anchor, words in texts if anchor == "start")


def test_a_drawing_of_a_program_without_operations():
    nothing = three_stages(lambda x: x, put("batch", shape=(B, D)))
    assert "0 operations" in lowering.draw_stages(*nothing, MESH).alt
