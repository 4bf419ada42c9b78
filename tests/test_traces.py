"""Traces: what ran is what the program says, every step is found, and nothing is counted twice."""

import collections
import functools
import os
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.profiler import ProfileData
from jax.sharding import NamedSharding, PartitionSpec as P

from meshbook import hloprotos, planes, programs
from meshbook.sharding import make_mesh
from meshbook.traces import Gap, Record, Trace, read_trace, trace
from meshbook.traffic import collectives

MESH = make_mesh((4, 2))
WARMUP, STEPS, TURNS = 2, 3, 4
X = np.ones((64, 64), np.float32)


@functools.partial(jax.jit, donate_argnums=0)
@jax.shard_map(mesh=MESH, in_specs=P("batch", "model"), out_specs=P("batch", "model"))
def train_step(x):
    """A loop with a collective in each turn, and another one after it, under psum's own name."""
    total = lambda y: jax.lax.psum(jnp.sin(y), "model")
    turn = lambda _, y: jax.lax.pcast(total(y), "model", to="varying")
    return jax.lax.psum(jax.lax.fori_loop(0, TURNS, turn, x), "batch") + x


def on_mesh():
    return jax.device_put(X, NamedSharding(MESH, P("batch", "model")))


def training(called=None):
    """A step that keeps its state, which train_step eats."""
    state = on_mesh()

    def step(number):
        nonlocal state
        if called is not None:
            called.append(number)
        state = train_step(state)
        return state

    return step


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on the mesh: its folder, and the numbers that step was called with."""
    called, folder = [], tmp_path_factory.mktemp("profiles")
    return trace(training(called), "mesh_4_2", WARMUP, STEPS, folder), called


@pytest.fixture(scope="module")
def found(run):
    return read_trace(run[0])


def test_a_run_has_its_name_and_one_profile(run):
    folder, called = run
    assert folder.name == "mesh_4_2" and called == list(range(WARMUP + STEPS))
    (file,) = folder.rglob("*.xplane.pb")
    assert re.fullmatch(r"plugins/profile/[^/]+/[^/]+", str(file.relative_to(folder)))
    assert os.listdir(folder.parent) == ["mesh_4_2"]


def test_every_collective_of_the_program_is_in_every_step_on_every_device(found):
    program = train_step.lower(on_mesh()).compile()
    expected = collectives(program, MESH).total.count
    assert expected == TURNS + 1
    counted = collections.Counter(
        (each.device, each.step) for each in found.records if each.kind == "collective")
    assert counted == {(device, WARMUP + step): expected
                       for device in range(8) for step in range(STEPS)}


def test_an_instruction_of_the_loop_runs_in_every_turn_and_the_loop_is_left_out(found):
    program = programs.read(train_step.lower(on_mesh()).compile())
    (loop,) = [each for each in program.computations[program.entry].instructions.values()
               if each.opcode == "while"]
    body = program.computations[loop.called("body")[0]].instructions
    names = {each.operation for each in found.records}
    assert loop.name not in names
    ran = [name for name in body if name in names]
    counts = {each.operation: each.count for each in found.operations()}
    assert ran and all(counts[name] % (8 * STEPS * TURNS) == 0 for name in ran)


def test_no_time_is_counted_twice(found):
    for device in range(8):
        ends = 0.0
        for each in found.only(device=device).records:
            assert each.start >= ends
            ends = each.start + each.duration


def test_step_times_and_gaps_fill_each_devices_time(found):
    assert list(found.step_times()) == list(range(WARMUP, WARMUP + STEPS))
    for device, busy in found.by_device().items():
        own = [each for each in found.records if each.device == device]
        idle = sum(gap.duration for gap in found.gaps() if gap.device == device)
        assert busy + idle == pytest.approx(max(each.end for each in own) - own[0].start)


def test_the_programs_in_a_profile_are_the_programs_that_ran(run):
    (file,) = run[0].rglob("*.xplane.pb")
    known = hloprotos.opcodes(file.read_bytes())
    program = programs.read(train_step.lower(on_mesh()).compile())
    expected = {each.name: each.opcode for body in program.computations.values()
                for each in body.instructions.values()}
    (ran,) = {event.program for event in planes.read(file).events}
    read = {name: opcode for (module, name), (opcode, _) in known.items() if module == ran}
    assert len(read) > 10
    assert read == expected


def test_steps_on_one_device_and_a_program_between_the_steps(tmp_path):
    one, other = jax.jit(lambda x: jnp.sin(x @ x)), jax.jit(lambda x: jnp.cos(x) + 1)
    step = lambda number: (one(X), other(X))
    both = read_trace(trace(step, "one", 1, STEPS, tmp_path))
    assert {each.device for each in both.records} == {0}
    assert list(both.step_times()) == [1, 2, 3]
    each_step = [collections.Counter(each.operation for each in both.only(step=number).records)
                 for number in (1, 2, 3)]
    assert each_step[0] == each_step[1] == each_step[2] and None not in both.step_times()
    state = on_mesh()
    with jax.profiler.trace(tmp_path / "between"):
        with jax.profiler.StepTraceAnnotation("step", step_num=7):
            state = train_step(state)
        jax.block_until_ready(train_step(state))
    between = read_trace(tmp_path / "between")
    assert {each.step for each in between.records} == {7, None}
    assert len(between.only(step=7).records) == len(between.records) // 2


def burning(x):
    return jax.lax.while_loop(lambda s: s[0] < 40, lambda s: (s[0] + 1, jnp.sin(s[1]) * 1.01),
                              (0, x))[1]


def all_of(program, instruction):
    """The instruction, and all that it calls."""
    yield instruction
    for name in instruction.called("calls", "to_apply", "body"):
        for each in program.computations[name].instructions.values():
            yield from all_of(program, each)


@pytest.mark.parametrize("slow, opcode", [(lambda x: x @ x, "dot"), (burning, "sine")])
def test_a_slow_operation_is_on_top_of_the_table(tmp_path, slow, opcode):
    big, small = jnp.ones((700, 700)), jnp.ones((32, 32))
    planted = jax.jit(lambda a, b: (jnp.tanh(b @ b) + b, slow(a), jnp.cos(b) * b))
    found = read_trace(trace(lambda number: planted(big, small), "slow", 1, 2, tmp_path))
    top = found.operations()[0]
    program = programs.read(planted.lower(big, small).compile())
    (instruction,) = [body[top.operation] for body in program.computations.values()
                      if top.operation in body.instructions]
    inside = list(all_of(program, instruction))
    assert {each.shape.dims for each in inside if each.opcode == opcode} == {big.shape}
    assert top.kind == "compute" and top.operation in repr(found).splitlines()[1]


@pytest.mark.parametrize("name", ["", "a/b", "../a", ".a", "a b", "é", None, "a\n"])
def test_a_bad_name_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="expected a name of letters"):
        trace(training(), name, folder=tmp_path)
    assert not os.listdir(tmp_path)


def test_numbers_of_steps_and_steps_without_arrays_are_refused(tmp_path):
    for warmup, steps in ((-1, 3), (0, 0)):
        with pytest.raises(ValueError, match=f"found warmup={warmup}, steps={steps}"):
            trace(training(), "a", warmup, steps, tmp_path)
    for warmup in (0, 1):
        with pytest.raises(ValueError, match="expected step to return arrays.*found None"):
            trace(lambda number: None, "a", warmup, 1, tmp_path)
    assert not os.listdir(tmp_path)


def test_a_run_is_replaced_only_when_the_new_one_is_complete(tmp_path):
    contents = lambda: [path.read_bytes() for path in tmp_path.rglob("*.xplane.pb")]
    step = training()
    trace(step, "run", 0, 1, tmp_path)
    before = contents()

    def failing(number):
        if number:
            raise OSError("disk full")
        return step(number)

    with pytest.raises(OSError, match="disk full"):
        trace(failing, "run", 0, 2, tmp_path)
    assert contents() == before and os.listdir(tmp_path) == ["run"]
    trace(step, "run", 0, 2, tmp_path)
    assert len(contents()) == 1 and contents() != before and os.listdir(tmp_path) == ["run"]
    assert len(read_trace(tmp_path / "run").step_times()) == 2


def test_the_old_run_comes_back_where_the_new_one_cannot_take_its_place(tmp_path, monkeypatch):
    old = trace(training(), "run", 0, 1, tmp_path)
    rename = os.rename

    def refuse(source, target):
        if str(source).endswith("new"):
            raise OSError("no")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(OSError, match="no"):
        trace(training(), "run", 0, 2, tmp_path)
    assert len(read_trace(old).step_times()) == 1


def test_a_folder_with_something_else_is_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    with pytest.raises(FileExistsError, match="mine is in the way"):
        trace(training(), "mine", 0, 1, tmp_path)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years"


def test_missing_and_ambiguous_runs_are_refused(run, tmp_path):
    with pytest.raises(FileNotFoundError, match="found nothing at .*nowhere"):
        read_trace(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="expected a profile .* found none"):
        read_trace(tmp_path)
    (file,) = run[0].rglob("*.xplane.pb")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vm.xplane.pb").write_bytes(file.read_bytes())
    with pytest.raises(ValueError, match="found 2: one/vm.xplane.pb, two/vm.xplane.pb; name one"):
        read_trace(tmp_path)
    assert read_trace(tmp_path / "two" / "vm.xplane.pb").records == read_trace(run[0]).records


def test_broken_and_foreign_files_are_refused(run, tmp_path):
    whole = next(run[0].rglob("*.xplane.pb")).read_bytes()
    file, random = tmp_path / "a.xplane.pb", np.random.default_rng(0)
    for contents in (whole[: len(whole) // 2], whole[:-1], whole[:11], random.bytes(5000),
                     b"not a profile", bytes(100)):
        file.write_bytes(contents)
        with pytest.raises(ValueError, match=r"a\.xplane\.pb: expected a profile"):
            read_trace(tmp_path)
    for contents in (b"", ProfileData.text_proto_to_serialized_xspace(
            'planes { name: "/host:CPU" }')):
        file.write_bytes(contents)
        with pytest.raises(ValueError, match=r"a\.xplane\.pb: expected operations that ran"):
            read_trace(tmp_path)


def space(spaces, protos=()):
    """An XSpace of {plane: {line: [(event, start in us, duration in us, stats)]}}, encoded."""
    text = "".join(_plane(name, lines) for name, lines in spaces.items())
    for at, (name, proto) in enumerate(protos):
        data = "".join(f"\\{byte:03o}" for byte in proto)
        text += ('planes { name: "/host:metadata" event_metadata { key: %d value { id: %d name: '
                 '"%s" stats { metadata_id: 1 bytes_value: "%s" } } } }' % (at, at, name, data))
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


def read_space(tmp_path, spaces, protos=()):
    file = tmp_path / "host.xplane.pb"
    file.write_bytes(space(spaces, protos))
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
    assert found.only(device=0).gaps() == [
        Gap(0, pytest.approx(0.05), pytest.approx(0.05), 6)]  # what overlaps leaves no gap


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
    event = planes.Event(0, "p", operation, 0, 1, None, "", kernel)
    return planes.kinds(planes.Profile([event], {}, [], known), [event])[0]


@pytest.mark.parametrize("expected, cases", {
    "collective": [("all-reduce",), ("all-gather-start",), ("collective-permute-done",),
                   ("fusion", ("parameter", "all-reduce", "dynamic-slice")),
                   ("async-start", ("reduce-scatter", "parameter")),
                   ("async-done", (), "reduce-scatter-done.2"), ("send",),
                   (None, (), "all-to-all.5"), (None, (), "psum_invariant.3"),
                   (None, (), "f", "ncclDevKernel_AllGather_RING_LL")],
    "compute": [("dot",), ("fusion", ("parameter", "add")), ("fusion", ("dot", "all-gather")),
                ("custom-call",), ("reduce",), (None, (), "fusion.8"), (None, (), "f", "gemm_f32")],
    "copy": [("copy",), ("copy-done",), ("fusion", ("parameter", "transpose", "copy")),
             ("partition-id",), (None, (), "copy.5"), (None, (), "x", "MemcpyH2D")],
}.items())
def test_an_operations_kind(expected, cases):
    assert [kind(*case) for case in cases] == [expected] * len(cases)


RECORDS = (Record(0, "dot.1", "compute", 0.0, 2.0, 4), Record(1, "dot.1", "compute", 0.5, 2.0, 4),
           Record(0, "all-reduce", "collective", 2.5, 1.0, 4),
           Record(1, "add", "compute", 3.0, 0.5, 4),
           Record(0, "dot.1", "compute", 5.0, 2.0, 5), Record(0, "copy", "copy", 9.0, 0.5, None))


def test_times_are_added_up_by_operation_kind_and_device():
    made = Trace(RECORDS)
    assert made.by_operation() == {"dot.1": 6.0, "all-reduce": 1.0, "add": 0.5, "copy": 0.5}
    assert made.by_kind() == {"compute": 6.5, "collective": 1.0, "copy": 0.5}
    assert made.by_device() == {0: 5.5, 1: 2.5}
    assert made.share("collective") == 1 / 8 and made.share("sleep") == 0
    assert made.spans() == {4: (0.0, 3.5), 5: (5.0, 7.0)}
    assert made.step_times() == {4: 3.5, 5: 2.0}
    assert made.gaps() == [Gap(0, 2.0, 0.5, 4), Gap(1, 2.5, 0.5, 4), Gap(0, 3.5, 1.5, 5)]
    assert made.only(step=4, device=1).records == (RECORDS[1], RECORDS[3])
    assert Trace([]).share("compute") == 0 and Trace([]).gaps() == []
    over = Trace([Record(0, "psum", "collective", 1.0, 1.0, 0), Record(0, "add", "compute", 6, 1, 1),
                  Record(0, "dot", "compute", 0.0, 5.0, 0)])  # a stream beside another one
    assert over.gaps() == [Gap(0, 5.0, 1.0, 1)] and over.spans()[0] == (0.0, 5.0)


def test_the_table_names_the_longest_and_adds_up_the_rest():
    made = Trace(RECORDS)
    assert repr(made.operations(1)).splitlines() == [
        "operation  kind       ms  share  count",
        "dot.1      compute  6.00  75.0%      3",
        "3 others            2.00  25.0%      3"]
    assert made.operations(1)._repr_markdown_().splitlines()[1:] == [
        "| :-- | :-- | --: | --: | --: |", "| dot.1 | compute | 6.00 | 75.0% | 3 |",
        "| 3 others |  | 2.00 | 25.0% | 3 |"]
    assert [each.operation for each in made.operations(3)] == ["dot.1", "all-reduce", "add", "copy"]
    assert sum(each.share for each in made.operations(2)) == pytest.approx(1)
    assert repr(made) == repr(made.operations()) and "copy" in made._repr_markdown_()


def test_a_pandas_table_on_request(monkeypatch):
    made = Trace(RECORDS)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="expected pandas, found none"):
        made.frame()
    monkeypatch.undo()
    frame = made.frame()
    assert list(frame.columns) == ["device", "operation", "kind", "start", "duration", "step"]
    assert [tuple(row) for row in frame.astype(object).where(frame.notna(), None).to_numpy()] == [
        tuple(each) for each in RECORDS]
    assert frame.groupby("step").size().to_dict() == {4: 4, 5: 1}
    assert str(frame.step.dtype) == "Int64"  # no 4.0, although one record has no step
    assert frame.groupby("operation").duration.sum().to_dict() == pytest.approx(made.by_operation())
    assert frame[frame.device == 1].duration.sum() == pytest.approx(made.by_device()[1])
    assert made.only(device=99).frame().empty
