"""Play a TPU's program through by its compiler's clock: what runs on a device from when to when.

The core takes the operations in the order of the schedule, one at a time. Copies between the
device's memory and that beside the core go on beside them, one after the other, and so do
collectives, on the links; what waits for one of them (its `-done`) leaves the core idle until it is
there. The core and the copies share the memory's bandwidth: where both want it, each has a half.
"""

import collections
import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from meshbook.hlo import clock, execution, memory, opcodes
from meshbook.hlo.exchanges import UNKNOWN, Exchanges
from meshbook.hlo.module import shape_bytes
from meshbook.hlo.wire import wire_seconds

CORE, COPIES, LINKS = "core", "copies", "links"


class Span(NamedTuple):
    """One run of an operation, in seconds, and where: on the core, among copies, on the links.

    cost: what the clock says of it, None for what is no operation of the core. exchange: the kind
    of a collective on the links, such as "all-to-all".
    """

    operation: str
    kind: str
    where: str
    start: float
    end: float
    op_name: str
    cost: clock.Cost | None
    exchange: str | None = None


class NoEstimates(ValueError):
    """A program in whose text no operation that computes has an estimate of its time."""


def play(compiled: Any, mesh: Any, device: Any, ring: bool = True,
         taken: Mapping[str, Sequence[Collection[int]]] | None = None):
    """Spans of one run of a program that was compiled for a TPU, by their start.

    compiled: `jax.stages.Compiled`, or HLO text. mesh: the one that it was compiled for, None for
    one device. device: a TPU of `meshbook.costs.devices`; ring: as of `wire_seconds`. A loop is
    played as often as it turns, of a conditional its longest branch. taken: {part of the op_name of
    a conditional, or its name: for each turn of the loop around it, the branches that some device
    takes}: the longest of these is played. Devices wait for each other in every turn.
    Raises NoEstimates; ValueError for an opcode that is not known, for a device without a clock and
    another mesh, and where `taken` does not fit the program; UnknownTripCount where a loop does not
    say how often it turns.
    """
    exchanges = Exchanges(compiled, mesh)
    player = _Player(exchanges, device, ring, taken or {})
    player.run(exchanges.program.computations[exchanges.program.entry], execution.nothing)
    player.wait_for_all()
    costs = [each for each in player.costs.values() if each.kind == "compute"]
    if costs and all(each.estimate is None for each in costs):
        raise NoEstimates(f"expected estimated_cycles in the program's text, as a TPU's compiler "
                          f"writes them; found none for its {len(costs)} operations that compute")
    return sorted(player.spans, key=lambda span: span.start)


class _Player:
    """A device's core, the queue of its copies, its links, and the time."""

    def __init__(self, exchanges, device, ring, taken):
        self.exchanges, self.device, self.ring = exchanges, device, ring
        self.program, self.spans, self.now = exchanges.program, [], 0.0
        self.taken = {each.name: (key, taken[key])
                      for each, key in execution.named_conditionals(self.program, taken)}
        self.turn = self.turns = None  # of the loop that is played
        self.copies, self.ready, self.link_free = collections.deque(), {}, 0.0
        self.costs = {}

    def run(self, computation, given: Callable):
        """Everything in a computation, in its order."""
        for instruction in computation.instructions.values():
            opcode = instruction.opcode
            if opcode in memory.FREE:
                continue
            if not opcodes.known(opcode):
                raise ValueError(f"expected the opcodes of meshbook.hlo.opcodes; found {opcode!r}, "
                                 f"of %{instruction.name}: another version of the compiler?")
            if opcode == "while":
                self._loop(execution.loop(self.program, computation, instruction, given))
            elif opcode == "conditional":
                self._longest(self._taken(instruction))
            elif opcode == "call":
                inner = self.program.computations[instruction.called("to_apply")[0]]
                self.run(inner, execution.handed(self.program, computation, instruction, given))
            else:
                self._operation(computation, instruction)

    def _loop(self, loop):
        body, condition = (self.program.computations[each] for each in loop[:2])
        around, trips = (self.turn, self.turns), loop.trips()
        for turn in range(trips):
            self.turn, self.turns = turn, trips
            self.run(condition, loop.given)
            self.run(body, loop.given)
        self.run(condition, loop.given)
        self.turn, self.turns = around

    def _taken(self, instruction):
        """The branches of a conditional that are taken in this turn: names of computations."""
        branches = execution.branches_of(instruction)
        if instruction.name not in self.taken:
            return branches
        key, by_turn = self.taken[instruction.name]
        if self.turns != len(by_turn):
            raise ValueError(f"taken[{key!r}]: expected branches for each of the {self.turns} "
                             f"turns of the loop around %{instruction.name}; found {len(by_turn)}")
        if not by_turn[self.turn] or not {*by_turn[self.turn]} <= {*range(len(branches))}:
            raise ValueError(f"taken[{key!r}]: expected some of the {len(branches)} branches of "
                             f"%{instruction.name}; found {by_turn[self.turn]}")
        return [branches[each] for each in by_turn[self.turn]]

    def _longest(self, branches):
        """Play each branch, and go on with the one that takes longest."""
        ends = []
        for name in branches:
            other = copy.copy(self)
            other.spans, other.ready = list(self.spans), dict(self.ready)
            other.copies = copy.deepcopy(self.copies)
            other.run(self.program.computations[name], execution.nothing)
            ends.append(other)
        self.__dict__.update(max(ends, key=lambda each: each.now).__dict__)

    def _operation(self, computation, instruction):
        found = self._exchanged(computation, instruction)
        name, opcode = instruction.name, instruction.opcode
        if opcode.endswith(("-done", "-update")):
            self._wait(instruction.operands[0])
        elif found is None and opcode.endswith("-start"):
            self.copies.append([name, instruction.op_name, _copied(instruction.shape), None])
            self.ready.pop(name, None)
        elif found is None or found[1] == "carried":
            self._work(computation, instruction)
        elif found[1] == "ends":
            self._wait(found[2])
        elif found[1] == "starts":
            self._send(found[0], found[2], instruction)
        else:  # nothing else runs on the core meanwhile
            self._send(found[0], name, instruction)
            self._wait(name)

    def _exchanged(self, computation, instruction):
        """(Exchange, what happens to it here, its key) of a collective; None for the others."""
        parts = list(clock.inside(self.program, computation, instruction))
        marks = {each.attributes.get("custom_call_target", "").strip('"')
                 for _, each in parts if each.opcode == "custom-call"}
        for where, each in [(computation, instruction), *parts]:
            found = self.exchanges.find(where, each)
            if found is None or not found.axes and each.opcode not in opcodes.COLLECTIVE:
                continue
            key = self.exchanges.chain(each)
            if "AsyncCollectiveDone" in marks:
                return found, "ends", key
            if "AsyncCollectiveStart" in marks:
                return found, "starts", key
            if not found.axes:
                return found, "carried", key
            asynchronous = instruction.opcode.endswith("-start")
            return found, "starts" if asynchronous else "waits", instruction.name
        return None

    def _send(self, exchange, key, instruction):
        """A collective begins on the links as soon as they are free."""
        if exchange.axes == UNKNOWN:
            sizes = [len(exchange.groups[0])]
        else:
            sizes = [self.exchanges.mesh.shape[axis] for axis in exchange.axes]
        moved = 1, shape_bytes(exchange.shape)
        begin = max(self.now, self.link_free)
        self.link_free = begin + wire_seconds(exchange.kind, sizes, moved, self.device, self.ring)
        self.ready[key] = self.link_free
        self.spans.append(Span(instruction.name, "collective", LINKS, begin, self.link_free,
                               instruction.op_name, None, exchange.kind))

    def _work(self, computation, instruction):
        """The core works, while copies go on; the memory is shared."""
        name = instruction.name
        if name not in self.costs:
            self.costs[name] = clock.cost(self.program, computation, instruction, self.device)
        cost, begin = self.costs[name], self.now
        left, band = cost.seconds, self.device.bandwidth
        wanted = cost.moved / left if left else 0.0  # bytes a second, at full speed
        while left > 0 and self.copies:
            copied = max(band / 2, band - wanted)
            speed = min(1.0, (band - copied) / wanted) if wanted else 1.0
            passed = min(left / speed, self.copies[0][2] / copied)
            left -= passed * speed
            self._copy(passed, copied)
        self.now += max(left, 0.0)
        self.spans.append(
            Span(name, cost.kind, CORE, begin, self.now, instruction.op_name, cost))

    def _copy(self, passed, rate):
        """The first copy goes on for some time at some rate, and ends if all is there."""
        first = self.copies[0]
        first[3] = self.now if first[3] is None else first[3]
        self.now += passed
        first[2] -= passed * rate
        if first[2] <= 1e-6:
            self.copies.popleft()
            self.ready[first[0]] = self.now
            self.spans.append(Span(first[0], "copy", COPIES, first[3], self.now, first[1], None))

    def _wait(self, key):
        """The core is idle until a copy or a collective is done, or all of them are."""
        if key not in self.ready and all(first[0] != key for first in self.copies):
            return self.wait_for_all()
        while key not in self.ready:
            self._copy(self.copies[0][2] / self.device.bandwidth, self.device.bandwidth)
        self._idle(self.ready[key])

    def _idle(self, until):
        while self.copies and self.now < until:
            passed = min(until - self.now, self.copies[0][2] / self.device.bandwidth)
            self._copy(passed, self.device.bandwidth)
        self.now = max(self.now, until)

    def wait_for_all(self):
        """Until no copy is left and the links are free."""
        while self.copies:
            self._copy(self.copies[0][2] / self.device.bandwidth, self.device.bandwidth)
        self._idle(self.link_free)


def _copied(shape):
    """Bytes of an asynchronous copy, or slice, that leave the device's memory or come into it.

    shape: (result, operand, ...) of a copy-start, ((operands), result, ...) of another start.
    """
    source, result = (shape[0][0], shape[1]) if isinstance(shape[0], tuple) else shape[1::-1]
    return memory.of_device(result, source) + memory.of_device(result, result)
