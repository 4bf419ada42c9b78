"""Traces: what ran is what the program says, every step is found, and nothing is counted twice."""

import collections
import functools
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.profiler import ProfileData
from jax.sharding import NamedSharding, PartitionSpec as P

from meshbook.hlo.module import parse
from meshbook.hlo.collectives import collectives
from meshbook.profiling import hlo_protos, traces, xplane
from meshbook.profiling.traces import Record, Trace, read_trace, trace
from meshbook.sharding import make_mesh

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


@pytest.fixture(autouse=True, scope="module")
def compiled_here():
    """The programs are compiled: those that JAX kept from another run are not in a profile."""
    kept = jax.config.jax_compilation_cache_dir
    for folder in (None, kept):
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()
        if folder is None:
            yield


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
    program = parse(train_step.lower(on_mesh()).compile())
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
    known = hlo_protos.opcodes(file.read_bytes())
    program = parse(train_step.lower(on_mesh()).compile())
    expected = {each.name: each.opcode for body in program.computations.values()
                for each in body.instructions.values()}
    (ran,) = {event.program for event in xplane.read_profile(file).events}
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
    program = parse(planted.lower(big, small).compile())
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


def test_a_step_that_is_not_known_is_missing_in_the_table_and_others_are_whole_numbers():
    records = Record(0, "a", "compute", 0.0, 1.0, None), Record(0, "b", "compute", 1.0, 2.0, 3)
    column = Trace(records).frame()["step"]
    assert str(column.dtype) == "Int64" and column.isna().tolist() == [True, False]


def test_a_profile_has_no_calls_of_python_and_few_of_the_runtimes():
    options = traces._options()
    assert (options.python_tracer_level, options.host_tracer_level) == (0, 1)
