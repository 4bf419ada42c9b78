"""The memory traffic of a compiled program: bytes that one device reads and writes.

Every instruction that is left after fusion reads its operands from memory and writes its result
to it; what happens inside a fusion stays in registers. Of an array that is only sliced, the slices
count. What a cache holds from one instruction to the next is not known to a program, so this is
what an ideal machine without caches would move.

Source: openxla/xla, `xla/service/hlo_cost_analysis.cc`, which counts a loop's body once.
"""

import collections
from collections.abc import Callable
from typing import Any

from meshbook.hlo import execution, module

FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all",
        "partition-id", "replica-id", "opt-barrier", "optimization-barrier")
WALKED = ("call", "while", "conditional")
SLICES = ("slice", "dynamic-slice", "gather")


def memory_traffic(compiled: Any):
    """Count the bytes that one device reads from its memory and writes to it, loops multiplied.

    compiled: `jax.stages.Compiled`, or HLO text. Raises UnknownTripCount where a loop does not say
    how often it turns.

    >>> memory_traffic(jax.jit(lambda x_MK, w_KN: x_MK @ w_KN).lower(x_MK, w_KN).compile())
    """
    program = module.parse(compiled)

    def measure(computation, instruction):
        if instruction.opcode in WALKED:
            return None
        return collections.Counter(bytes=moved(program, computation, instruction))

    return execution.tally(program, measure)["bytes"]


def of_any(part: module.Shape | tuple, whole: module.Shape | tuple):
    """The bytes of a part of an array, wherever the array lies."""
    return module.shape_bytes(part)


def of_device(part: module.Shape | tuple, whole: module.Shape | tuple):
    """The bytes that a part takes in the device's memory, tiles filled up; 0 if it is not there.

    What lies beside a TPU's core, or in its registers, is not in the device's memory.
    """
    if isinstance(part, tuple):
        wholes = whole if isinstance(whole, tuple) else [whole] * len(part)
        return sum(map(of_device, part, wholes))
    return part.tiled_bytes if whole.space == 0 else 0


def moved(
    program: module.Module, computation: module.Computation, instruction: module.Instruction,
    size: Callable = of_any,
):
    """Bytes that one instruction reads and writes, those of what it slices as size(part, whole)."""
    opcode, name = instruction.opcode, instruction.name
    if opcode in FREE:
        return 0
    if opcode == "fusion":
        inner = program.computations[instruction.called("calls")[0]]
        inputs = [each for each in inner.instructions.values() if each.opcode == "parameter"]
        return sum(_read(program, inner, each.name, size) for each in inputs) + _written(
            program, inner, inner.root, size)
    operands = dict.fromkeys(operand for operand in instruction.operands if operand != name)
    read = sum(_read(program, computation, each, size, [instruction]) for each in operands)
    return read + _written(program, computation, name, size)


def _read(program, computation, name, size, users=None):
    """Bytes of one array that its users read: all of it, or what they slice from it.

    In a fusion there may be others, which slice.
    """
    users = users or [each for each in computation.instructions.values() if name in each.operands]
    shape, total = computation[name].shape, 0
    for user in users:
        first = user.operands[0] == name
        if user.opcode == "bitcast":
            total += _read(program, computation, user.name, size)
        elif user.opcode == "fusion":
            inner = program.computations[user.called("calls")[0]]
            total += sum(_read(program, inner, each.name, size)
                         for each in inner.instructions.values() if each.opcode == "parameter"
                         and user.operands[int(each.literal)] == name)
        elif first and user.opcode in SLICES:
            total += size(user.shape, shape)
        # An array that is updated in place is not read: `_written` counts what changes.
        elif not (first and user.opcode in ("dynamic-update-slice", "scatter")):
            return size(shape, shape)
    return min(total, size(shape, shape))


def _written(program, computation, name, size, whole=None):
    """Bytes that become new: of an array that is updated in place, only the update.

    whole: the array that is written, of which a bitcast's operand has another shape.
    """
    instruction = computation[name]
    whole = instruction.shape if whole is None else whole
    if instruction.opcode == "tuple":
        return sum(_written(program, computation, operand, size, own)
                   for operand, own in zip(instruction.operands, instruction.shape, strict=True))
    if instruction.opcode == "bitcast":
        return _written(program, computation, instruction.operands[0], size, whole)
    if instruction.opcode == "fusion":
        inner = program.computations[instruction.called("calls")[0]]
        return _written(program, inner, inner.root, size, whole)
    if instruction.opcode == "dynamic-update-slice":
        return size(computation[instruction.operands[1]].shape, whole)
    if instruction.opcode == "scatter":  # what is there is read, changed and written
        return 2 * size(computation[instruction.operands[2]].shape, whole)
    return size(instruction.shape, whole)
