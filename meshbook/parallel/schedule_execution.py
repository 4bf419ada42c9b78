"""Pipeline schedules executed: one controller, three programs per stage, a mesh for each device.

A schedule says in which order the programs start. The controller starts one after the other and
waits for none of them; a program waits for the arrays that it reads. Between stages, arrays are
sent by `jax.device_put`.
"""
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float

from meshbook.parallel.schedules import Event, Schedule, simulate, stage_of, stages_of
from meshbook.parallel.stage_programs import Stage, bytes_of_shard, kept_after
from meshbook.sharding import place


class Executed(NamedTuple):
    """What running a schedule made, and what was seen meanwhile.

    losses: of each microbatch. gradients: those of their mean, a tree per stage like its weights.
    events: what ran, in this order; start and end as simulated. held: after each event, the bytes
    on the first device of its mesh, less those before the step. sent: bytes on the wire, by (from
    device, to device) of the schedule.
    """
    losses: list[Any]
    gradients: list[Any]
    events: list[Event]
    held: list[int]
    sent: Mapping[tuple[int, int], int]


def to_mesh(x: Array, mesh: Mesh):
    """An array on the devices of another mesh, sharded as it was."""
    return jax.device_put(x, NamedSharding(mesh, x.sharding.spec))


def execute(schedule: Schedule, stages: Sequence[Stage], batches: Sequence[Mapping[str, Any]],
            send: Callable = to_mesh):
    """Make the loss and the gradients of a step in the order of a schedule: an Executed.

    stages: from compile_stages, as many as the schedule has. batches: a microbatch each, of NumPy
    arrays. send(x, mesh): how an array gets to the devices of another stage, by default to_mesh.
    The loss is the mean of the microbatches'. Raises ValueError for another number of stages or
    microbatches, and what `simulate` raises.
    """
    events, held = simulate(schedule).events, []
    check_fits(schedule, stages, batches)
    step = Step(stages, batches, send, len(schedule))
    before = [held_on(stage.mesh) for stage in stages]
    for device, task, *_ in events:
        number = stage_of(device, task, len(schedule))
        for kind in task.kind:
            step.run(kind, task.microbatch, number)
        held.append(held_on(stages[number].mesh) - before[number])
    gradients = [jax.tree.unflatten(jax.tree.structure(stage.weights), totals)
                 for stage, totals in zip(stages, step.totals)]
    return Executed(step.losses, gradients, events, held, step.sent)


class Step:
    """A step on its way.

    values: by (microbatch, stage), the arrays that wait there for their next program, by variable.
    totals: each stage's sums of gradients so far.
    """

    def __init__(self, stages: Sequence[Stage], batches: Sequence[Mapping[str, Any]],
                 send: Callable, devices: int):
        self.stages, self.batches, self.send, self.devices = stages, batches, send, devices
        self.values, self.losses, self.sent = {}, [None] * len(batches), Counter()
        self.totals = [[jax.device_put(np.zeros(w.shape, w.dtype), w.sharding)
                        for w in jax.tree.leaves(stage.weights)] for stage in stages]

    def run(self, kind: str, microbatch: int, number: int):
        """Run a program of a stage, send what the next stage needs, keep what this one will."""
        stage, values = self.stages[number], self.values.pop((microbatch, number), {})
        if kind == "F":
            values |= self.inputs(stage, microbatch, first=number == 0)
        if kind == "B" and number == len(self.stages) - 1:
            one = np.float32(1 / len(self.batches))  # this microbatch's share of the mean
            values[stage.three.dy] = jax.device_put(one, NamedSharding(stage.mesh, P()))
        reads, makes, program = stage.parts[kind]
        known = dict(zip(stage.three.weights, jax.tree.leaves(stage.weights))) | values
        made = program([known[v] for v in reads], self.totals[number] if kind == "W" else [])
        if kind == "W":
            self.totals[number] = made
            return
        values |= zip(makes, made)
        if kind == "F":
            self.pass_on(values[stage.three.y], microbatch, number, number + 1, "x")
        elif stage.three.dx:
            self.pass_on(values[stage.three.dx[0]], microbatch, number, number - 1, "dy")
        self.values[microbatch, number] = {v: values[v] for v in kept_after(stage, kind)}

    def inputs(self, stage: Stage, microbatch: int, first: bool):
        """What a stage reads of the batch, on its devices, by variable."""
        batch = self.batches[microbatch]
        read = {key: v for key, v in stage.batch.items()
                if any(v in part.reads for part in stage.parts.values())}
        placed = place({key: batch[key] for key in {*read, *(["inputs"] if first else [])}},
                       stage.mesh)
        found = {v: placed[key] for key, v in read.items()}
        return found | ({stage.three.x: placed["inputs"]} if first else {})

    def pass_on(self, x: Array, microbatch: int, number: int, other: int, name: str):
        """Give an array to the next stage; what the last one finds is a loss."""
        if other == len(self.stages):
            self.losses[microbatch] = x
        elif other >= 0:
            mesh = self.stages[other].mesh
            if mesh != self.stages[number].mesh:
                x = self.send(x, mesh)
                pair = number % self.devices, other % self.devices
                self.sent[pair] += bytes_of_shard(x) * mesh.size
            variable = getattr(self.stages[other].three, name)
            self.values.setdefault((microbatch, other), {})[variable] = x


def expected_held(events: Sequence[Event], stages: Sequence[Stage]):
    """The bytes on each event's device after it, as Executed.held, from what stages keep.

    Of each microbatch there is what kept_after names, and what has arrived for the next program.
    """
    p, last, here, held = 1 + max(event.device for event in events), len(stages) - 1, Counter(), []
    for device, (kind, i, chunk), *_ in events:
        number = chunk * p + device
        for part in kind:
            here[i, number] = sum(map(stages[number].bytes_of, kept_after(stages[number], part)))
            for name, other in {"F": [("x", number + 1)], "B": [("dy", number - 1)]}.get(part, []):
                if 0 <= other <= last:
                    variable = getattr(stages[other].three, name)
                    here[i, other] += stages[other].bytes_of(variable)
                elif other > last:
                    here["loss", last] += stages[last].bytes_of(stages[last].three.y)
        held.append(sum(size for (_, s), size in here.items() if s % p == device))
    return held


def held_on(mesh: Mesh):
    """The bytes of all arrays that there are on the first device of a mesh."""
    device = mesh.devices.flat[0]
    return sum(bytes_of_shard(x) for x in jax.live_arrays() if device in x.sharding.device_set)


def check_fits(schedule: Schedule, stages: Sequence[Stage], batches: Sequence[Mapping]):
    """ValueError unless there are as many stages and microbatches as the schedule has."""
    wanted = stages_of(schedule), 1 + max(task.microbatch for task in schedule[0])
    for name, given, count in zip(("stages", "microbatches"), (stages, batches), wanted):
        if len(given) != count:
            raise ValueError(f"the schedule has {count} {name}; found {len(given)}")
