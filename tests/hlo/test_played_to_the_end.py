"""What a played schedule waits for: one collective of several, and copies that nobody asks for."""

import dataclasses

import pytest
from meshes import abstract_mesh

from meshbook.costs.devices import DEVICES
from meshbook.hlo import clock, module, schedule
from meshbook.hlo.wire import wire_seconds

V5E, MESH, N = DEVICES["TPU v5e"], abstract_mesh(8, 1), 4 * 1024 * 1024
FAR, NEAR = "f32[1024,1024]{1,0:T(8,128)}", "f32[1024,1024]{1,0:T(8,128)S(1)}"
GATHERED = "f32[8192,1024]{1,0:T(8,128)}"


def played(*lines, before=""):
    """Spans by operation of an ENTRY with these lines, whose %x is FAR."""
    text = "\n  ".join([f"%x = {FAR} parameter(0)", *lines])
    found = schedule.play(f"HloModule m, is_scheduled=true, num_partitions=8\n\n{before}"
                          f"ENTRY %main (x: f32[]) -> f32[] {{\n  {text}\n}}\n", MESH, V5E)
    return {span.operation: span for span in found}


def working(name, seconds, operand="x"):
    """An operation of the core that takes so long."""
    return (f"%{name} = {NEAR} negate(%{operand}), "
            f'backend_config={{"estimated_cycles":"{round(seconds * V5E.clock)}"}}')


def carried(number, mark, result):
    """(a computation, an operation that calls it): a collective's start or its end as a fusion."""
    name = f"{mark.lower()}{number}"
    gather = (f"%gather = {GATHERED} all-gather(%p), channel_id={number}, dimensions={{0}}, "
              "replica_groups=[1,8]<=[8], use_global_device_ids=true, "
              f'frontend_attributes={{chain_id="{number}"}}')
    body = (f"%of_{name} (p: f32[]) -> f32[] {{\n  %p = {FAR} parameter(0)\n  {gather}\n"
            f"  ROOT %mark = {result} custom-call(%gather), "
            f'custom_call_target="AsyncCollective{mark}"\n}}\n\n')
    return body, f"%{name} = {result} fusion(%x), kind=kCustom, calls=%of_{name}"


@pytest.mark.parametrize("last", [1, 2])
def test_of_two_collectives_in_flight_the_core_waits_for_the_one_that_it_needs(last):
    """The second begins when the links are free, and the core goes on while it is sent."""
    wire = wire_seconds("all-gather", [8], (1, 8 * N), V5E)
    parts = [carried(number, mark, GATHERED) for mark in ("Start", "Done") for number in (1, 2)]
    before = "".join(body for body, _ in parts)
    start1, start2, *done = [line for _, line in parts]
    first, second = done if last == 2 else done[::-1]
    found = played(start1, start2, first, working("one", wire / 4), second,
                   working("two", wire / 4), before=before)
    links = [span for span in found.values() if span.where == schedule.LINKS]
    assert [(span.start, span.end) for span in links] == [
        pytest.approx((0, wire)), pytest.approx((wire, 2 * wire))]
    assert found["one"].start == pytest.approx(wire if last == 2 else 2 * wire)
    assert found["one"].end > found["one"].start
    assert found["two"].start == pytest.approx(2 * wire if last == 2 else found["one"].end)


def test_copies_and_collectives_that_nobody_waits_for_are_played_to_their_end():
    copy = f"({NEAR}, {FAR}, u32[]{{:S(2)}}) copy-start(%x)"
    found = played(working("one", 30e-6), f"%a = {copy}", f"%b = {copy}",
                   carried(1, "Start", GATHERED)[1], before=carried(1, "Start", GATHERED)[0])
    begin, each = found["one"].end, N / V5E.bandwidth
    assert (found["a"].start, found["a"].end) == pytest.approx((begin, begin + each))
    assert (found["b"].start, found["b"].end) == pytest.approx((begin + each, begin + 2 * each))
    wire = wire_seconds("all-gather", [8], (1, 8 * N), V5E)
    assert (found["start1"].start, found["start1"].end) == pytest.approx((begin, begin + wire))


@pytest.mark.parametrize("cycles, scaled", [(10_000, True), (34_500, True), (34_501, False)])
def test_up_to_four_times_what_its_bytes_are_charged_with_an_estimate_is_one_of_bytes(
        cycles, scaled):
    """Of 4,000 bytes that the compiler charges with 8,000, and a cycle brings one of them."""
    device = dataclasses.replace(V5E, clock=V5E.bandwidth)
    text = (f"HloModule m\n\n%body (y: f32[]) -> f32[] {{\n  %y = bf16[1000]{{0}} parameter(0)\n"
            f"  ROOT %n = bf16[1000]{{0}} negate(%y)\n}}\n\nENTRY %main (y: f32[]) -> f32[] {{\n"
            f"  %y = bf16[1000]{{0}} parameter(0)\n  ROOT %f = bf16[1000]{{0}} fusion(%y), "
            f'kind=kLoop, calls=%body, backend_config={{"estimated_cycles":"{cycles}"}}\n}}\n')
    program = module.parse(text)
    entry = program.computations[program.entry]
    assert clock.MOST * 8_000 + clock.START == 34_500  # a few cycles are for its start
    found = clock.cost(program, entry, entry["f"], device)
    assert (found.basis == "scaled") == scaled
