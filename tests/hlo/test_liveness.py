"""Live bytes, against counting by hand and against what XLA allocates."""

import functools
import gzip
import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from meshbook.hlo.liveness import live_bytes
from meshbook.planning import topologies
from meshbook.planning.programs import recorded_program
from meshbook.sharding import make_mesh

PROGRAMS = pathlib.Path(__file__).parents[1] / "support" / "programs"
W, X = jnp.ones((128, 128)), jnp.ones((1024, 128))
KB_W, KB_X = W.nbytes, X.nbytes


def compiled(function, *arguments, donate=()):
    return jax.jit(function, donate_argnums=donate).lower(*arguments).compile()


def test_a_product_holds_its_operands_and_its_result():
    found = live_bytes(compiled(jnp.matmul, X, W))
    assert found.peak == KB_X + KB_W + KB_X
    assert [(each.role, each.shape.bytes) for each in found.largest()] == [
        ("argument", KB_X), ("output", KB_X), ("argument", KB_W)]
    assert found.by_role()["output"][found.at] == KB_X
    assert repr(found) == (f"at most 1.11 MB live on a device, at instruction {found.at + 1} of "
                           f"{len(found.schedule)}, %{found.schedule[found.at]}")


def chain(x, w):
    """Only two of its seven products are needed at once, and tanh works in place."""
    for _ in range(6):
        x = jnp.tanh(x @ w)
    return x @ w


def test_what_is_read_for_the_last_time_makes_room():
    found = live_bytes(compiled(chain, X, W))
    assert found.peak == KB_X + KB_W + 2 * KB_X
    assert all(each.source for each in found.largest())


def test_a_gradient_holds_what_its_backward_pass_reads():
    loss = lambda weights, x: functools.reduce(lambda x, w: jnp.sin(x @ w), weights, x).sum()
    peaks = [live_bytes(compiled(jax.grad(loss), [W] * depth, X)).peak for depth in (4, 8)]
    kept = (peaks[1] - peaks[0] - 4 * KB_W) / 4  # a layer more: a weight, and what it leaves
    assert KB_X <= kept <= 2 * KB_X + 2 * KB_W


def test_a_donated_argument_makes_room_for_the_result():
    given, kept = (live_bytes(compiled(jnp.cos, X, donate=donate)).peak for donate in ((0,), ()))
    assert (given, kept) == (KB_X, 2 * KB_X)


def test_a_loop_holds_its_state_and_the_most_of_its_body_once():
    turn = lambda carry, w: (jnp.tanh(carry @ w), None)
    loop = lambda turns: live_bytes(compiled(
        lambda x, weights: jax.lax.scan(turn, x, weights)[0], X, jnp.ones((turns, 128, 128))))
    assert loop(8).peak - loop(4).peak == 4 * KB_W
    argument, state, product = KB_X, KB_X, KB_X
    held = loop(4).peak - (4 * KB_W + argument + state + product + KB_W)
    assert 0 <= held < 100  # and its counter
    (inside,) = (each.source for each in loop(4).buffers if each.source.endswith(", inside"))
    assert "while" in inside


def loss(weights, x):
    return (functools.reduce(lambda x, w: jax.nn.relu(x @ w), weights, x) ** 2).mean()


def descend(weights, x):
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, x))


def scanned(weights, x):
    body = jax.checkpoint(lambda x, w: (jnp.tanh(jnp.sin(x @ w) @ w), None))
    return jax.lax.scan(body, x, weights)[0].sum()


def sharded():
    mesh = make_mesh((4, 2))
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    rows = NamedSharding(mesh, P("batch", None))
    step = lambda w_in, w_out, x: jnp.einsum(
        "bf,fd->bd", jax.nn.gelu(x @ w_in), w_out, out_sharding=rows).sum()
    return jax.jit(jax.grad(step, argnums=(0, 1))).lower(
        put(W, None, "model"), put(W, "model", None), put(X, "batch", None)).compile()


@pytest.mark.parametrize("program", [
    lambda: compiled(jnp.matmul, X, W), lambda: compiled(chain, X, W),
    lambda: compiled(jax.grad(loss), [W] * 4, X),
    lambda: compiled(descend, [W] * 4, X, donate=0),
    lambda: compiled(jax.grad(scanned), jnp.ones((6, 128, 128)), X),
    lambda: compiled(lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, lambda x: (x @ x.T) @ x, x), X),
    sharded,
], ids=["product", "chain", "gradient", "descend", "scan", "cond", "sharded"])
def test_it_is_a_little_less_than_what_xla_allocates(program):
    """XLA allocates for the whole run: outputs before they are written, and gaps in one block."""
    program = program()
    found, memory = live_bytes(program), program.memory_analysis()
    allocated = (memory.argument_size_in_bytes + memory.output_size_in_bytes
                 + memory.temp_size_in_bytes - memory.alias_size_in_bytes)
    later = sum(each.shape.bytes for each in found.buffers
                if each.role == "output" and each.first > found.at)
    assert 0.92 * allocated - later <= found.peak <= allocated


SCHEDULE = """HloModule jit_f, is_scheduled=true, input_output_alias={ {1}: (1, {}, may-alias) }

ENTRY %main (a: f32[256], b: f32[256]) -> (f32[256], f32[256]) {
  %a = f32[256]{0} parameter(0)
  %b = f32[256]{0} parameter(1)
  %gather = (f32[256]{0}, f32[1024]{0}) all-gather-start(%a), dimensions={0}
  %move = (f32[256]{0}, f32[256]{0}, u32[]) copy-start(%b), metadata={op_name="jit(f)/copy"}
  %moved = f32[256]{0} copy-done(%move)
  %gathered = f32[1024]{0} all-gather-done(%gather)
  %sum = f32[256]{0} custom-call(%gathered), custom_call_target="sum"
  %twice = f32[256]{0} add(%sum, %sum)
  ROOT %both = (f32[256]{0}, f32[256]{0}) tuple(%twice, %moved)
  %idle = token[] after-all()
}
"""


def test_what_begins_and_what_is_done_are_one_buffer():
    """In kB: a stays, b is donated and read until it is copied, the gathered array is 4."""
    found = live_bytes(SCHEDULE)
    assert [size // 1024 for size in found.bytes] == [2, 2, 6, 7, 7, 6, 7, 3, 3, 3]
    roles = {each.name: each.role for each in found.buffers if each.shape.dims}
    assert roles == {"a": "argument", "b": "argument", "gather": "temporary", "move": "output",
                     "sum": "output"}
    assert {each.source for each in found.buffers if each.name == "move"} == {"jit(f)/copy"}


@pytest.mark.parametrize("path", sorted(PROGRAMS.glob("*.gz")), ids=lambda path: path.name)
def test_every_compilers_schedule_is_read(path):
    found = live_bytes(gzip.open(path, "rt").read())
    arguments = found.by_role()["argument"]
    assert found.peak == max(found.bytes) == sum(each.bytes for each in found.largest())
    assert arguments[0] == max(arguments) and found.peak > arguments[0]
    assert len(found.bytes) == len(found.schedule) and min(found.bytes) > 0


def in_kernel(*lines, shape="f32[256]"):
    """In kB what is live: arguments a of 1 kB and b of 4, and then these lines."""
    return [size // 1024 for size in live_bytes(
        "HloModule jit_f, is_scheduled=true\n\n%add (x: f32[]) -> f32[] {\n"
        "  ROOT %x = f32[] parameter(0)\n}\n\nENTRY %main (a: f32[256], b: f32[1024]) -> "
        f"{shape} {{\n  %a = f32[256]{{0}} parameter(0)\n  %b = f32[1024]{{0}} parameter(1)\n  "
        + "\n  ".join(lines) + "\n}\n").bytes[2:]]


KERNEL = 'custom_call_target="kernel"'


@pytest.mark.parametrize("aliases, live", [
    ("", [9, 13, 10, 6]), (", output_to_operand_aliasing={{}: (0, {})}", [9, 9, 10, 6]),
])
def test_a_kernel_writes_into_the_operand_that_it_says(aliases, live):
    assert in_kernel(
        f"%c = f32[1024]{{0}} custom-call(%a), {KERNEL}",
        f"%d = f32[1024]{{0}} custom-call(%c), {KERNEL}{aliases}",
        f"%e = f32[256]{{0}} custom-call(%d), {KERNEL}",
        "ROOT %f = f32[256]{0} bitcast(%e)") == live


def test_each_part_of_a_kernels_result_may_lie_in_an_operand_of_its_own():
    """Of (1, 4, 1) kB the first two lie in arguments, as cuBLAS, and a fusion, may have it."""
    for opcode in f"custom-call(%a, %b), {KERNEL}", "fusion(%a, %b), kind=kCustom, calls=%add":
        made = f"%k = (f32[256]{{0}}, (f32[1024]{{0}}, f32[256]{{0}})) {opcode}"
        first = "ROOT %r = f32[256]{0} get-tuple-element(%k), index=0"
        assert in_kernel(made, first) == [11, 6]
        assert in_kernel(made + ", output_to_operand_aliasing={{0}: (0, {})}", first) == [10, 5]
        assert in_kernel(
            made + ", output_to_operand_aliasing={{0}: (0, {}), {1, 0}: (1, {})}", first) == [6, 5]
    pair = "%t = (f32[256]{0}, f32[1024]{0}) tuple(%a, %b)"
    kernel = f"%k = f32[1024]{{0}} custom-call(%t), {KERNEL}"
    last = "ROOT %r = f32[1024]{0} bitcast(%k)"
    assert in_kernel(pair, kernel, last) == [5, 9, 9]
    assert in_kernel(pair, kernel + ", output_to_operand_aliasing={{}: (0, {1})}", last) == [5, 5, 5]
    constant = "%c = f32[1024]{0} constant({...})"  # has no buffer: the result has its own
    of_constant = kernel.replace("%t", "%c") + ", output_to_operand_aliasing={{}: (0, {})}"
    assert in_kernel(constant, of_constant, last) == [5, 9, 9]


LATE = """HloModule jit_f, is_scheduled=true

ENTRY %main (a: f32[256]) -> f32[256] {
  %a = f32[256]{0} parameter(0)
  %pair = (f32[1024]{0}, f32[256]{0}) custom-call(%a), custom_call_target="pair"
  %large = f32[1024]{0} get-tuple-element(%pair), index=0
  %sum = f32[256]{0} custom-call(%large), custom_call_target="sum"
  %idle = f32[256]{0} custom-call(%sum), custom_call_target="idle"
  %small = f32[256]{0} get-tuple-element(%pair), index=1
  ROOT %all = f32[256]{0} custom-call(%small, %idle), custom_call_target="all"
}
"""


def test_what_takes_one_array_from_a_tuple_late_does_not_keep_the_others():
    assert [size // 1024 for size in live_bytes(LATE).bytes] == [1, 6, 6, 7, 4, 3, 4]


def test_on_a_tpu_tiles_are_filled_up_and_what_lies_beside_the_core_does_not_count():
    tiled = LATE.replace("f32[1024]{0}", "f32[1024]{0:T(2048)}")
    assert [size // 1024 for size in live_bytes(tiled).bytes] == [1, 10, 10, 11, 4, 3, 4]
    beside = LATE.replace("f32[1024]{0}", "f32[1024]{0:S(1)}")
    assert [size // 1024 for size in live_bytes(beside).bytes] == [1, 2, 2, 3, 4, 3, 4]


@pytest.mark.parametrize("name", ["v2-8 (8, 1) 512", "v5e-8 (8, 1) 1024"])
def test_it_is_what_a_tpus_compiler_calls_live(name):
    cell = topologies.recorded()[name]
    found = live_bytes(recorded_program(name)[0])
    assert found.peak == pytest.approx(cell.live, rel=1e-3) and found.bytes[0] == cell.arguments


def test_a_program_without_a_schedule_is_refused():
    text = compiled(jnp.matmul, X, W).as_text()
    with pytest.raises(ValueError, match="expected a compiled program with a schedule"):
        live_bytes(text.replace("is_scheduled=true, ", ""))
    with pytest.raises(ValueError, match="expected the text of a compiled program"):
        live_bytes("nothing")
