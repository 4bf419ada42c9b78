"""The compiler's clock, and the schedule played by it, against times added up by hand."""

import gzip
import pathlib
import re

import pytest
from meshes import abstract_mesh

from meshbook.costs.devices import DEVICES
from meshbook.hlo import clock, module, schedule
from meshbook.hlo.collectives import collectives
from meshbook.hlo.execution import UnknownTripCount
from meshbook.hlo.wire import wire_seconds

PROGRAMS = pathlib.Path(__file__).parents[1] / "support" / "programs"
V5E = DEVICES["TPU v5e"]
N = 4 * 1024 * 1024  # bytes of FAR
FAR, NEAR = "f32[1024,1024]{1,0:T(8,128)}", "f32[1024,1024]{1,0:T(8,128)S(1)}"
BAND, GATHERED = V5E.bandwidth, "f32[8192,1024]{1,0:T(8,128)}"
ALL = "channel_id=1, replica_groups=[1,8]<=[8], use_global_device_ids=true"


def cycles(seconds):
    """Attributes of an operation that the compiler expects to take so long."""
    count = round(seconds * V5E.clock)
    return f'backend_config={{"window_config":{{"estimated_cycles":"{count}"}}}}'


OVERFLOWN = f'backend_config={{"window_config":{{"estimated_cycles":"{clock.OVERFLOWN}"}}}}'


def played(*lines, mesh=None, before=""):
    """Spans by operation of an ENTRY with these lines, whose %x is FAR."""
    header = f"HloModule m, is_scheduled=true, num_partitions={mesh.size if mesh else 1}\n\n"
    text = "\n  ".join([f"%x = {FAR} parameter(0)", *lines])
    found = schedule.play(f"{header}{before}ENTRY %main (x: f32[1024,1024]) -> f32[] {{\n  {text}\n}}\n",
                          mesh, V5E)
    return {span.operation: span for span in found}


def length(span):
    return span.end - span.start


@pytest.mark.parametrize("text, size, space", [
    ("f32[16,65,48]{2,1,0:T(8,128)}", 16 * 72 * 128 * 4, 0),
    ("f32[16,65,48]{0,2,1:T(8,128)S(1)}", 65 * 48 * 128 * 4, 1),
    ("bf16[64,3,4,32]{0,3,2,1:T(4,128)(2,1)S(1)}", 3 * 4 * 32 * 128 * 2, 1),
    ("f32[]{:T(128)}", 512, 0), ("f32[10]{0}", 40, 0), ("u32[]{:S(2)}", 4, 2),
])
def test_the_last_tiles_of_an_array_are_filled_up(text, size, space):
    shape = module._shape(text, 0)[0]
    assert (shape.tiled_bytes, shape.space) == (size, space)
    assert shape == module.Shape(shape.dtype, shape.dims)  # layouts do not make shapes different


def test_an_operation_takes_its_estimate_or_what_its_bytes_need():
    found = played(f"%slow = {FAR} sort(%x), {cycles(40e-6)}",
                   f"%wide = {FAR} sort(%x, %slow), {cycles(1e-6)}",
                   f"%unknown = {FAR} sort(%x, %slow), {OVERFLOWN}",
                   f"ROOT %near = {NEAR} negate(%x), {cycles(1e-6)}")
    assert length(found["slow"]) == pytest.approx(40e-6)
    assert length(found["wide"]) == pytest.approx(3 * N / BAND)
    assert length(found["unknown"]) == pytest.approx(3 * N / BAND)
    assert length(found["near"]) == pytest.approx(N / BAND)  # what is written lies beside the core
    assert found["unknown"].cost.estimate is None and found["wide"].cost.moved == 3 * N
    assert [found[name].cost.basis for name in ("slow", "wide", "unknown")] == [
        "estimate", "memory", "memory"]
    assert found["near"].end == pytest.approx(sum(map(length, found.values())))


def fused(opcode, shape, times, result=FAR, before=""):
    """The Cost of a fusion of one operation, whose estimate is so many times its bytes' time."""
    body = (f"%body (y: f32[]) -> f32[] {{\n  %y = {shape} parameter(0)\n  %zero = f32[] constant(0)"
            f"\n  ROOT %out = {result} {opcode}\n}}\n\n")
    size = module._shape(shape, 0)[0].tiled_bytes + module._shape(result, 0)[0].tiled_bytes
    found = played(f"%y = {shape} custom-call(), custom_call_target=\"AllocateBuffer\"",
                   f"ROOT %f = {result} fusion(%y), kind=kLoop, calls=%body, "
                   f"{cycles(times * size / BAND)}", before=before + body)
    return found["f"].cost, size / BAND


SUM = ("%add (a: f32[], b: f32[]) -> f32[] {\n  %a = f32[] parameter(0)\n  %b = f32[] parameter(1)\n"
       "  ROOT %c = f32[] add(%a, %b)\n}\n\n")
HALVES, ROW = "bf16[1024,1024]{1,0:T(8,128)(2,1)}", "f32[1024]{0:T(1024)}"


def test_an_estimate_is_scaled_to_the_bytes_that_are_moved():
    found, least = fused("negate(%y)", FAR, 1.25)  # four bytes an element: charged as it is
    assert found.seconds == pytest.approx(1.25 * least, rel=1e-4) and found.basis == "estimate"
    found, least = fused("negate(%y)", HALVES, 2.5, HALVES)  # two: charged twice
    assert found.seconds == pytest.approx(1.25 * least, rel=1e-4) and found.basis == "scaled"
    assert found.estimate == pytest.approx(2.5 * least, rel=1e-4)
    found, least = fused("reduce(%y, %zero), dimensions={0}, to_apply=%add", FAR, 2.5, ROW, SUM)
    assert found.seconds == pytest.approx(1.25 * least, rel=1e-2)  # as much written as read
    found, least = fused("negate(%y)", HALVES, 1.5, HALVES)
    assert found.seconds == pytest.approx(least) and found.basis == "memory"


def test_an_estimate_of_much_arithmetic_stays():
    found, least = fused("negate(%y)", HALVES, 9, HALVES)
    assert found.seconds == pytest.approx(9 * least, rel=1e-4) and found.basis == "estimate"


def test_an_estimate_is_not_scaled_below_its_arithmetic():
    """Seventy steps an element take longer than half of what was charged for its bytes."""
    steps = "\n  ".join(f"%s{n + 1} = {HALVES} xor(%s{n}, %s{n})" for n in range(70))
    body = f"negate(%s70)\n  %s0 = {HALVES} copy(%y)\n  {steps}"
    found, least = fused(body, HALVES, 3.5, HALVES)
    assert found.seconds == pytest.approx(71 * 1024 * 1024 / (4 * 8 * 128) / V5E.clock)
    assert found.basis == "scaled" and 1.75 * least < found.seconds < 3.5 * least


def test_a_single_step_for_each_element_takes_what_a_fusion_of_it_does():
    found = played(f"ROOT %a = {FAR} add(%x, %x), {cycles(60e-6)}")["a"].cost
    assert found.seconds == pytest.approx(clock.USUAL * 2 * N / BAND + clock.START / V5E.clock)
    assert found.basis == "scaled" and found.estimate == pytest.approx(60e-6)


COPY = (f"%start = ({NEAR}, {FAR}, u32[]{{:S(2)}}) copy-start(%x)", f"%done = {NEAR} copy-done(%start)")


def test_a_copy_that_nobody_competes_with_costs_the_core_nothing():
    found = played(COPY[0], f"%slow = {FAR} sort(%x), {cycles(40e-6)}", COPY[1],
                   f"ROOT %b = {NEAR} negate(%done), {cycles(1e-6)}")
    assert length(found["slow"]) == pytest.approx(40e-6)
    assert found["b"].start == pytest.approx(40e-6)
    assert length(found["start"]) == pytest.approx(N / (BAND - 2 * N / 40e-6))
    assert found["start"].where == schedule.COPIES and found["start"].kind == "copy"


def test_a_core_and_a_copy_that_both_want_the_memory_have_a_half_each():
    found = played(COPY[0], f"%wide = {FAR} sort(%x), {cycles(1e-6)}", COPY[1],
                   f"ROOT %b = {NEAR} negate(%done), {cycles(1e-6)}")
    assert length(found["start"]) == pytest.approx(N / (BAND / 2))
    assert found["wide"].end == pytest.approx(3 * N / BAND)  # all bytes at the full rate


def test_a_core_waits_for_a_copy_that_is_not_there():
    found = played(*COPY, f"ROOT %b = {NEAR} negate(%done), {cycles(1e-6)}")
    assert found["b"].start == pytest.approx(N / BAND)


def test_copies_go_one_after_the_other():
    second = [line.replace("%start", "%start2").replace("%done", "%done2") for line in COPY]
    found = played(COPY[0], second[0], second[1], COPY[1],
                   f"ROOT %b = {NEAR} add(%done, %done2), {cycles(1e-6)}")
    assert found["start2"].start == pytest.approx(found["start"].end)
    assert found["b"].start == pytest.approx(2 * N / BAND)


def test_a_collective_beside_the_core_is_hidden_and_one_alone_is_not():
    mesh = abstract_mesh(8, 1)
    wire = wire_seconds("all-gather", [8], (1, 8 * N), V5E)
    start = f"%start = ({FAR}, {GATHERED}) all-gather-start(%x), {ALL}, dimensions={{0}}"
    done = f"%done = {GATHERED} all-gather-done(%start)"
    work = f"%slow = {FAR} sort(%x), {cycles(3 * wire)}"
    last = f"ROOT %b = {NEAR} negate(%x), {cycles(1e-6)}"
    hidden = played(start, work, done, last, mesh=mesh)
    assert length(hidden["start"]) == pytest.approx(wire) and hidden["start"].start == 0
    assert hidden["b"].start == pytest.approx(3 * wire)
    late = played(work, start, done, last, mesh=mesh)
    assert late["b"].start == pytest.approx(4 * wire)
    alone = played(f"%whole = {GATHERED} all-gather(%x), {ALL}, dimensions={{0}}", work, last,
                   mesh=mesh)
    assert alone["slow"].start == pytest.approx(wire)
    assert alone["whole"].kind == "collective" and alone["whole"].where == schedule.LINKS


LOOP = ("%body (s: (s32[], f32[1024,1024])) -> (s32[], f32[1024,1024]) {{\n"
        "  %s = (s32[], {far}) parameter(0)\n  %i = s32[] get-tuple-element(%s), index=0\n"
        "  %y = {far} get-tuple-element(%s), index=1\n  %turn = {far} sort(%y), {time}\n"
        "  %one = s32[] constant(1)\n  %next = s32[] add(%i, %one)\n"
        "  ROOT %t = (s32[], {far}) tuple(%next, %turn)\n}}\n\n"
        "%cond (s: (s32[], f32[1024,1024])) -> pred[] {{\n  %s = (s32[], {far}) parameter(0)\n"
        "  %i = s32[] get-tuple-element(%s), index=0\n  %n = s32[] {bound}\n"
        "  ROOT %less = pred[] compare(%i, %n), direction=LT\n}}\n\n")


def looped(bound):
    return ((f"%zero = s32[] constant(0)", f"%state = (s32[], {FAR}) tuple(%zero, %x)",
             f"ROOT %loop = (s32[], {FAR}) while(%state), condition=%cond, body=%body"),
            LOOP.format(far=FAR, time=cycles(50e-6), bound=bound))


def test_a_loop_is_played_as_often_as_it_turns():
    lines, before = looped("constant(7)")
    text = "\n  ".join([f"%x = {FAR} parameter(0)", *lines])
    spans = schedule.play(f"HloModule m\n\n{before}ENTRY %main (x: f32[]) -> f32[] {{\n  {text}\n}}\n",
                          None, V5E)
    turns = [span for span in spans if span.operation == "turn"]
    assert len(turns) == 7
    assert spans[-1].end == pytest.approx(7 * 50e-6, rel=1e-3)
    lines, before = looped("parameter(1)")
    with pytest.raises(UnknownTripCount):
        played(*lines, before=before)


def test_of_a_conditional_the_longest_branch_is_played():
    branch = ("%{name} (y: f32[1024,1024]) -> f32[1024,1024] {{\n  %y = {far} parameter(0)\n"
              "  ROOT %{name}_op = {far} sort(%y), {time}\n}}\n\n")
    before = "".join(branch.format(name=name, far=FAR, time=cycles(time))
                     for name, time in (("short", 20e-6), ("long", 50e-6)))
    found = played("%flag = pred[] constant(true)",
                   f"ROOT %c = {FAR} conditional(%flag, %x, %x), true_computation=%short, "
                   "false_computation=%long", before=before)
    assert found.keys() == {"long_op"} and length(found["long_op"]) == pytest.approx(50e-6)


def branching(taken):
    """The spans of a loop of three turns with a conditional: branch 0 takes 50 us, branch 1 20."""
    branch = ("%{name} (y: f32[1024,1024]) -> f32[1024,1024] {{\n  %y = {far} parameter(0)\n"
              "  ROOT %{name}_op = {far} sort(%y), {time}\n}}\n\n")
    branches = "".join(branch.format(name=name, far=FAR, time=cycles(time))
                       for name, time in (("long", 50e-6), ("short", 20e-6)))
    lines, loop = looped("constant(3)")
    turn = next(line for line in loop.splitlines() if "%turn = " in line)
    choice = (f"  %flag = pred[] constant(true)\n  %turn = {FAR} conditional(%flag, %y, %y), "
              'true_computation=%short, false_computation=%long, metadata={op_name="a/part/cond"}')
    text = "\n  ".join([f"%x = {FAR} parameter(0)", *lines])
    spans = schedule.play(
        f"HloModule m\n\n{branches}{loop.replace(turn, choice)}ENTRY %main (x: f32[]) -> f32[] {{\n"
        f"  {text}\n}}\n", None, V5E, taken=taken)
    return [span.operation for span in spans if span.operation.endswith("_op")]


def test_of_the_branches_that_are_taken_in_a_turn_the_longest_is_played():
    assert branching(None) == ["long_op"] * 3
    assert branching({"part": [{1}, {0, 1}, (1,)]}) == ["short_op", "long_op", "short_op"]


@pytest.mark.parametrize("taken, said", [
    ({"other": [{1}] * 3}, "keys that name a conditional; found 'other'"),
    ({"part": [{1}] * 2}, "each of the 3 turns of the loop around %turn; found 2"),
    ({"part": [{1}, {2}, {1}]}, r"some of the 2 branches of %turn; found \{2\}"),
    ({"part": [{1}, set(), {1}]}, "some of the 2 branches")])
def test_branches_that_do_not_fit_the_program_are_refused(taken, said):
    with pytest.raises(ValueError, match=said):
        branching(taken)


def test_what_is_not_known_is_said():
    with pytest.raises(ValueError, match="expected estimated_cycles.*found none for its 1"):
        played(f"ROOT %a = {FAR} add(%x, %x)")
    with pytest.raises(ValueError, match="'blend', of %a: another version"):
        played(f"ROOT %a = {FAR} blend(%x, %x)")
    with pytest.raises(ValueError, match="clock rate is known; found H100"):
        schedule.play(f"HloModule m\n\nENTRY %main (x: f32[]) -> f32[] {{\n  %x = {FAR} parameter(0)\n"
                      f"  ROOT %a = {FAR} add(%x, %x)\n}}\n", None, DEVICES["H100"])


SAVED = [("v5e-data", (8, 1)), ("v5e-tensor", (4, 2)), ("v5e-full", (4, 2)), ("v5e-scan", (4, 2)),
         ("v2-data", (8, 1)), ("v2-tensor", (4, 2)), ("v2-full", (4, 2)), ("v2-scan", (4, 2)),
         *((f"{tpu}-tensor", (4, 2)) for tpu in ("v3", "v4", "v5p", "v6e", "tpu7x"))]
NAMED = {"tpu7x": "TPU7x"}


@pytest.mark.parametrize("name, shape", SAVED)
def test_every_collective_of_a_real_program_is_on_the_links_once(name, shape):
    text = gzip.decompress((PROGRAMS / f"{name}.txt.gz").read_bytes()).decode()
    tpu, mesh = name.partition("-")[0], abstract_mesh(*shape)
    device = DEVICES[NAMED.get(tpu, f"TPU {tpu}")]
    spans = schedule.play(text, mesh, device)
    links = [span for span in spans if span.where == schedule.LINKS]
    traffic = collectives(text, mesh)
    assert len(links) == traffic.total.count > 0
    assert sum(map(length, links)) >= 0.999 * sum(traffic.seconds(device).values())
    for where in (schedule.LINKS, schedule.CORE, schedule.COPIES):
        own = [span for span in spans if span.where == where]
        assert all(one.end <= two.start + 1e-12 for one, two in zip(own, own[1:]))


def test_estimates_are_those_of_the_text():
    text = gzip.decompress((PROGRAMS / "v5e-tensor.txt.gz").read_bytes()).decode()
    entry = text[text.index("\nENTRY"):]
    written = sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', entry)))
    spans = schedule.play(text, abstract_mesh(4, 2), V5E)
    read = sum(span.cost.estimate or 0 for span in spans if span.cost)
    assert read == pytest.approx(written / V5E.clock) and written > 1e5
    assert all(span.end - span.start >= 0.999 * span.cost.seconds for span in spans if span.cost)


def test_what_an_operation_is_made_of_is_found_in_fusions_of_fusions():
    text = gzip.decompress((PROGRAMS / "v5e-tensor.txt.gz").read_bytes()).decode()
    program = module.parse(text)
    entry = program.computations[program.entry]
    fusion = next(each for each in entry.instructions.values() if each.opcode == "fusion" and any(
        inner.opcode == "fusion" for inner in program.computations[
            each.called("calls")[0]].instructions.values()))
    found = {each.opcode for _, each in clock.inside(program, entry, fusion)}
    assert "fusion" not in found and "parameter" in found
