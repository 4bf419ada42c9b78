"""The reader of a profile's file: a GPU's streams, a TPU's lines, calls, and kinds of operations."""

import collections

import pytest
from jax.profiler import ProfileData

from meshbook.profiling import xplane
from meshbook.profiling.traces import Gap, read_trace


def space(spaces, protos=(), called="Hlo Proto", others=()):
    """An XSpace of {plane: {line: [(event, start in us, duration in us, stats)]}}, encoded.

    protos: (program, HLO proto), attached under the name `called`; others: (name, bytes) of more
    attachments of each program, before and after it.
    """
    text = "".join(_plane(name, lines) for name, lines in spaces.items())
    for at, (name, proto) in enumerate(protos):
        attached = [*others, (called, proto), *others]
        stats = "".join('stats { metadata_id: %d bytes_value: "%s" } ' % (
            number + 3, "".join(f"\\{byte:03o}" for byte in data))
            for number, (_, data) in enumerate(attached))
        text += ('planes { name: "/host:metadata" event_metadata { key: %d value { id: %d name: '
                 '"%s" %s } } ' % (at, at, name, stats))
        text += "".join('stat_metadata { key: %d value { id: %d name: "%s" } } ' % (
            number + 3, number + 3, stat) for number, (stat, _) in enumerate(attached)) + "}"
    return ProfileData.text_proto_to_serialized_xspace(text)


def _plane(plane, lines):
    names, stats, body = {}, {}, ""
    for line, events in lines.items():
        body += f'lines {{ name: "{line}" timestamp_ns: 1000 '
        for name, start, duration, own in events:
            body += (f"events {{ metadata_id: {names.setdefault(name, len(names) + 1)} "
                     f"offset_ps: {start * 10**6} duration_ps: {duration * 10**6} ")
            for stat, value in own.items():
                kind = "int64" if isinstance(value, int) else "str"
                body += (f"stats {{ metadata_id: {stats.setdefault(stat, len(stats) + 1)} "
                         f"{kind}_value: {repr(value).replace(chr(39), chr(34))} }} ")
            body += "} "
        body += "} "
    for kind, known in (("event", names), ("stat", stats)):
        body += "".join(f'{kind}_metadata {{ key: {at} value {{ id: {at} name: "{name}" }} }} '
                        for name, at in known.items())
    return f'planes {{ name: "{plane}" {body} }} '


def read_space(tmp_path, spaces, protos=(), **attached):
    file = tmp_path / "host.xplane.pb"
    file.write_bytes(space(spaces, protos, **attached))
    return read_trace(file)


STEP_LINE = {"python": [("step", 100 * at, 10, {"step_num": 5 + at}) for at in range(2)]}


def test_a_gpus_streams_are_read_and_its_steps_are_found_by_turn(tmp_path):
    def kernel(name, operation, start, duration):
        return name, start, duration, {"hlo_op": operation, "hlo_module": "jit_step"}

    compute = [kernel("gemm_128x64", name, start, 40)
               for start in (20, 120) for name in ("fusion.1",)]
    compute += [kernel("loop_add", "fusion.2", start, 5) for start in (60, 160, 65, 165)]
    moved = [("MemcpyD2D", 180, 2, {})]
    sums = [kernel("ncclDevKernel_AllReduce", "psum.3", start, 30) for start in (30, 130)]
    on_host = {"XLACpu": [("add", 50, 1, {"hlo_op": "add", "hlo_module": "jit_add"})]}
    found = read_space(tmp_path, {
        "/host:CPU": {**STEP_LINE, **on_host},
        "/device:GPU:0": {"Stream #13(Compute)": compute, "Stream #20(Compute)": sums,
                          "Stream #14(MemcpyD2D)": moved, "XLA Ops": compute},
        "/device:GPU:1": {"Stream #13(Compute)": compute},
    })
    assert found.by_device() == {0: pytest.approx(162e-3), 1: pytest.approx(100e-3)}
    assert found.by_kind() == pytest.approx({"compute": 0.2, "collective": 0.06, "copy": 0.002})
    steps = collections.Counter((each.operation, each.step) for each in found.records)
    assert steps == {("fusion.1", 5): 2, ("fusion.1", 6): 2, ("fusion.2", 5): 4,
                     ("fusion.2", 6): 4, ("psum.3", 5): 1, ("psum.3", 6): 1, ("MemcpyD2D", None): 1}
    (gap,) = found.only(device=0).gaps()  # what overlaps leaves no gap
    assert gap == pytest.approx(Gap(0, 0.05, 0.05, 6))


def test_a_tpus_line_of_operations_is_read_without_the_loop_around_them(tmp_path):
    text = "%all-reduce.1 = (f32[8]{0}, f32[8]{0}) all-reduce(%fusion.1, %fusion.2)"
    operations, modules = [], []
    for start, run in ((50, 11), (150, 12)):
        modules.append(("jit_step(7)", start, 40, {"run_id": run}))
        operations += [
            ("%while.1 = (s32[], f32[8]) while(%tuple.1)", start, 30, {}),
            ("%fusion.1 = f32[8]{0:T(256)} fusion(%all-reduce.9), kind=kLoop", start, 10, {}),
            (text, start + 10, 20, {}), ("%copy.2 = f32[8]{0} copy(%fusion.1)", start + 32, 4, {}),
            ("fusion.3", start + 36, 4, {})]
    found = read_space(tmp_path, {
        "/host:CPU": STEP_LINE,
        "/device:TPU:3": {"XLA Modules": modules, "XLA Ops": operations, "Steps": modules,
                          "Async XLA Ops": operations},
        "/device:TPU:3 SparseCore 0": {"XLA Ops": operations}})
    assert [each[:3] + each[5:] for each in found.only(step=6).records] == [
        (3, "fusion.1", "compute", 6), (3, "all-reduce.1", "collective", 6),
        (3, "copy.2", "copy", 6), (3, "fusion.3", "compute", 6)]
    assert len(found.records) == 8
    assert found.step_times() == {5: pytest.approx(0.04), 6: pytest.approx(0.04)}


def field(number, value):
    """One field of a protocol buffer: bytes, or a whole number below 128."""
    if isinstance(value, int):
        return bytes([number << 3 & 127 | (128 if number > 15 else 0),
                      *([number >> 4] if number > 15 else []), value])
    assert len(value) < 2**14
    key = [number << 3 & 127 | 2] if number < 16 else [number << 3 & 127 | 130, number >> 4]
    return bytes([*key, len(value) & 127 | 128, len(value) >> 7]) + value


def computation(number, *instructions):
    encoded = [field(1, name.encode()) + field(2, opcode.encode())
               + (field(38, bytes(called)) if called else b"")
               for name, opcode, *called in instructions]
    return field(3, b"".join(field(2, each) for each in encoded) + field(5, number))


def test_operations_are_known_by_the_program_in_the_file_not_by_their_names(tmp_path):
    module = b"".join([
        field(1, b"jit_f"), computation(1, ("p", "parameter"), ("t", "transpose")),
        computation(2, ("p", "parameter"), ("s", "reduce-scatter")), computation(3, ("m", "add")),
        computation(9, ("quiet.1", "all-reduce", 3), ("copy.1", "add"), ("plain.1", "fusion", 1),
                    ("later.1", "async-start", 2))])
    events = [(name, 10 * at, 5, {})
              for at, name in enumerate(("quiet.1", "copy.1", "plain.1", "later.1"))]
    for plane in ({"XLA Modules": [("jit_f(3)", 0, 99, {})]}, {}):
        found = read_space(tmp_path, {"/device:TPU:0": {"XLA Ops": events, **plane}},
                           [("jit_f(3)", field(1, module))])
        assert [each.kind for each in found.records] == [
            "collective", "compute", "copy", "collective"]
        assert {each.step for each in found.records} == {None} and found.step_times() == {}


@pytest.mark.parametrize("called, kind", [
    ("Hlo Proto", "collective"), ("hlo_proto", "collective"), ("other_proto", "compute")])
def test_only_an_attachment_that_is_called_so_is_taken_for_a_program(tmp_path, called, kind):
    """With some flags a TPU's profile has the code of its core besides, in another encoding."""
    module = field(1, b"jit_f") + computation(9, ("quiet.1", "all-reduce"))
    found = read_space(
        tmp_path, {"/device:TPU:0": {"XLA Ops": [("quiet.1", 0, 5, {})],
                                     "XLA Modules": [("jit_f(3)", 0, 99, {})]}},
        [("jit_f(3)", field(1, module))], called=called,
        others=[("llo_proto", b"\x24\x0c\xff"), ("program_id", b""),
                ("memory", field(1, computation(9, ("quiet.1", "add"))))])
    assert [each.kind for each in found.records] == [kind]


def test_a_call_holds_what_it_calls_and_not_what_another_thread_runs_meanwhile(tmp_path):
    module = field(1, b"jit_f") + computation(1, ("p", "parameter"), ("sine.1", "sine")) + (
        computation(9, ("call.1", "call", 1), ("call.2", "call", 1), ("dot.1", "dot")))
    ran = lambda name, start, duration: (
        name, start, duration, {"hlo_op": name, "hlo_module": "jit_f", "run_id": 1})
    found = read_space(tmp_path, {"/host:CPU": {
        "one": [ran("call.1", 0, 9), ran("sine.1", 1, 2), ran("call.2", 20, 9)],
        "two": [ran("dot.1", 21, 2)]}}, [("jit_f(3)", field(1, module))])
    assert [each.operation for each in found.records] == ["sine.1", "call.2", "dot.1"]


def kind(opcode, inside=(), operation="x.1", kernel=""):
    known = {("p", operation): (opcode, {str(at): each for at, each in enumerate(inside)})
             } if opcode else {}
    event = xplane.Event(0, "p", operation, 0, 1, None, "", kernel)
    return xplane.kinds(xplane.Profile([event], {}, [], known), [event])[0]


@pytest.mark.parametrize("expected, cases", {
    "collective": [("all-reduce",), ("all-gather-start",), ("collective-permute-done",),
                   ("fusion", ("parameter", "all-reduce", "dynamic-slice")),
                   ("async-start", ("reduce-scatter", "parameter")),
                   ("async-done", (), "reduce-scatter-done.2"), ("send",),
                   (None, (), "all-to-all.5"), (None, (), "psum_invariant.3"),
                   (None, (), "f", "ncclDevKernel_AllGather_RING_LL")],
    "compute": [("dot",), ("fusion", ("parameter", "add")), ("fusion", ("dot", "all-gather")),
                ("custom-call",), ("reduce",), (None, (), "fusion.8"), (None, (), "f", "gemm_f32"),
                (None, (), "f", "Cijk_Ailk_Bljk_SB_MT128.kd"), (None, (), "f", "__amd_rocclr_other")],
    "copy": [("copy",), ("copy-done",), ("fusion", ("parameter", "transpose", "copy")),
             ("partition-id",), (None, (), "copy.5"), (None, (), "x", "MemcpyH2D"),
             *((None, (), kernel, kernel) for kernel in (  # as AMD's, NVIDIA's and Intel's tools say
                 "__amd_rocclr_copyBuffer.kd", "__amd_rocclr_copyBufferRectAligned.kd",
                 "__amd_rocclr_fillBufferAligned.kd", "CopyDeviceToDevice", "hipMemcpyAsync",
                 "[CUDA memcpy DtoD]", "[CUDA memset]", "MemsetD8", "zeMemcpy"))],
}.items())
def test_an_operations_kind(expected, cases):
    assert [kind(*case) for case in cases] == [expected] * len(cases)


def test_what_only_contains_others_is_left_out_and_what_follows_is_not_inside():
    """Of operations that nobody knows, as on a GPU: on the same line, and within the same time."""
    event = lambda name, start, end, line="stream 1": xplane.Event(
        0, "p", name, start, end, 1, line, "")
    left = lambda *events: [each.operation for each in xplane.leaves(
        xplane.Profile([*events], {}, [], {}))]
    assert left(event("loop", 0, 10), event("a", 1, 4), event("b", 4, 10)) == ["a", "b"]
    assert left(event("a", 0, 5), event("mark", 5, 5), event("b", 5, 9)) == ["a", "mark", "b"]
    assert left(event("a", 0, 5), event("b", 3, 8)) == ["a", "b"]
    assert left(event("a", 0, 5), event("b", 1, 4, "stream 2")) == ["a", "b"]


def test_loops_contain_what_their_body_has_and_products_contain_nothing():
    known = {("p", "while.1"): ("while", {"dot.2": "dot"}), ("p", "dot.2"): ("dot", {}),
             ("p", "add.3"): ("add", {})}
    event = lambda name, start, end: xplane.Event(0, "p", name, start, end, 1, "core", "")
    left = lambda *events: [each.operation for each in xplane.leaves(
        xplane.Profile([*events], {}, [], known))]
    assert left(event("while.1", 0, 9), event("dot.2", 1, 5)) == ["dot.2"]
    assert left(event("while.1", 0, 9), event("add.3", 1, 5)) == ["while.1", "add.3"]
    assert left(event("dot.2", 0, 9), event("add.3", 1, 5)) == ["dot.2", "add.3"]
    assert left(event("while.1", 0, 9), event("add.3", 1, 5), event("dot.2", 5, 9)) == [
        "add.3", "dot.2"]
