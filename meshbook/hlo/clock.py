"""A TPU's compiler on how long each operation of a program takes: read, and corrected.

In the text of a program that was compiled for a TPU, most operations of its schedule carry
`estimated_cycles`, the compiler's own guess, by which it chose tiles and layouts. It is a guess and
no measurement. For matrix products it comes near to published times. For other operations it is the
longer of two: of the arithmetic, and of a transfer that the compiler charges too much for, since it
counts four bytes for every element, whatever its type, and for a sum as many elements written as
read. Where the transfer is the longer one, the estimate here is scaled to the bytes that the
operation really reads and writes, but to no less than its arithmetic needs. Nothing is quicker than
the device's memory can be; and that is all that there is to say of an operation without an
estimate, unless it is a kernel whose matmul is known: that takes no less than the device's peak.

Held against published times of real TPUs: `results/clock.json`.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from meshbook.hlo import flops, memory, opcodes
from meshbook.hlo.module import Computation, Instruction, Module, Shape

CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
OVERFLOWN = 2**62  # the compiler's sum went beyond what it can hold
# The compiler charges transfers with 1.1 to 1.3 times what they need at full bandwidth, and some
# cycles to start. A norm's arithmetic it charges with up to 3.7 times as much; published times of
# norms have no trace of that.
USUAL, MOST, START = 1.25, 4, 2500
LANES = 4 * 8 * 128  # elements that a core's vector units take in a cycle, by the same estimates
# One step for each element, in no fusion: charged with 1.4 to 1.9 times what a fusion that moves
# the same bytes is charged with (results/clock-rules.json).
SINGLE = opcodes.ELEMENTWISE | opcodes.SUMS | {"broadcast", "convert"}


class Cost(NamedTuple):
    """What one operation takes of a core.

    seconds: corrected; basis: what they are, the compiler's "estimate", that "scaled" to the bytes,
    or the time of the "memory", or of a kernel's "products". estimate: the compiler's, in seconds,
    None where it gives none. moved: bytes from and to the device's memory, whole tiles.
    """

    kind: str
    seconds: float
    basis: str
    estimate: float | None
    moved: int


def cost(program: Module, computation: Computation, instruction: Instruction, device: Any):
    """The Cost of an operation of a TPU's program on its device (`meshbook.costs.devices`).

    Raises ValueError for a device whose clock rate is not known.
    """
    if not device.clock:
        raise ValueError(f"expected a TPU whose clock rate is known; found {device.name}")
    names = {each.opcode for _, each in inside(program, computation, instruction)}
    moved = memory.moved(program, computation, instruction, memory.of_device)
    found = CYCLES.search(instruction.attributes.get("backend_config", ""))
    cycles = int(found[1]) if found and int(found[1]) < OVERFLOWN else None
    seconds, basis = 0.0, "memory"
    if cycles is not None:
        corrected = cycles if names & opcodes.PRODUCTS else _scaled(
            program, computation, instruction, names, cycles, device)
        seconds, basis = corrected / device.clock, "estimate" if corrected == cycles else "scaled"
    if moved / device.bandwidth > seconds:
        seconds, basis = moved / device.bandwidth, "memory"
    if instruction.opcode == "custom-call":
        products = (flops.of_custom_call(computation, instruction) or 0) / device.flops
        if products > seconds:
            seconds, basis = products, "products"
    return Cost(opcodes.kind(names), seconds, basis,
                None if cycles is None else cycles / device.clock, moved)


def _scaled(program, computation, instruction, names, cycles, device):
    """An estimate, scaled from the bytes that the compiler charges for to those that are moved."""
    moved = memory.moved(program, computation, instruction, _anywhere)
    charged = memory.moved(program, computation, instruction, _charged)
    if names & opcodes.SUMS:
        shapes = [each.shape for _, each in inside(program, computation, instruction)]
        widest = max((_charged(each, each) for each in shapes if isinstance(each, Shape)),
                     default=0)
        charged += max(0, widest - _charged(instruction.shape, instruction.shape))
    by_bytes = device.clock / device.bandwidth
    if instruction.opcode in SINGLE:
        return min(cycles, USUAL * moved * by_bytes + START)
    if cycles > MOST * charged * by_bytes + START or not charged:
        return cycles  # its arithmetic takes longer than its transfers
    scaled = cycles * min(1.0, moved / charged)
    return min(cycles, max(scaled, _arithmetic(program, computation, instruction)))


def _arithmetic(program, computation, instruction):
    """Cycles that the arithmetic of an operation needs at least, an element at a time."""
    steps = sum(each.shape.size for _, each in inside(program, computation, instruction)
                if each.opcode in opcodes.ELEMENTWISE and isinstance(each.shape, Shape))
    return steps / LANES


def _anywhere(part, whole):
    """Bytes of an array, its tiles filled up, in whatever memory of the device."""
    return sum(map(_anywhere, part, part)) if isinstance(part, tuple) else part.tiled_bytes


def _charged(part, whole):
    """What the compiler charges for an array: four bytes an element."""
    if isinstance(part, tuple):
        return sum(map(_charged, part, part))
    return part.tiled_bytes * 4 * part.size // max(part.bytes, 1) if part.bytes else 0


def inside(program: Module, computation: Computation, instruction: Instruction) -> Iterator[tuple]:
    """(computation, instruction) of what an operation is made of: itself, or all that it calls.

    A fusion calls; and, on a TPU7x, what its other cores do meanwhile, collectives among it.
    """
    called = instruction.called("calls", "to_apply", "called_computations") if (
        instruction.opcode in ("fusion", "call-start", "async-start")) else ()
    if not called:
        yield computation, instruction
    for name in called:
        inner = program.computations[name]
        for each in inner.instructions.values():
            yield from inside(program, inner, each)
