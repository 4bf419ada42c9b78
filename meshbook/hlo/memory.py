"""The memory traffic of a compiled program: bytes that one device reads and writes.

Every instruction that is left after fusion reads its operands from memory and writes its result
to it; what happens inside a fusion stays in registers. Of an array that is only sliced, the slices
count. What a cache holds from one instruction to the next is not known to a program, so this is
what an ideal machine without caches would move.

Source: openxla/xla, `xla/service/hlo_cost_analysis.cc`, which counts a loop's body once.
"""

import collections
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
        return collections.Counter(bytes=_moved(program, computation, instruction))

    return execution.tally(program, measure)["bytes"]


def _moved(program, computation, instruction):
    """Bytes that one instruction reads and writes."""
    opcode, name = instruction.opcode, instruction.name
    if opcode in FREE:
        return 0
    if opcode == "fusion":
        inner = program.computations[instruction.called("calls")[0]]
        inputs = [each for each in inner.instructions.values() if each.opcode == "parameter"]
        return sum(_read(inner, each.name) for each in inputs) + _written(inner, inner.root)
    operands = dict.fromkeys(operand for operand in instruction.operands if operand != name)
    read = sum(_read(computation, operand, [instruction]) for operand in operands)
    return read + _written(computation, name)


def _read(computation, name, users=None):
    """Bytes of one array that its users read: all of it, or what they slice from it."""
    users = users or [each for each in computation.instructions.values() if name in each.operands]
    total = 0
    for user in users:
        first = user.operands[0] == name
        if user.opcode == "bitcast":
            total += _read(computation, user.name)
        elif first and user.opcode in SLICES:
            total += module.shape_bytes(user.shape)
        # An array that is updated in place is not read: `_written` counts what changes.
        elif not (first and user.opcode in ("dynamic-update-slice", "scatter")):
            return module.shape_bytes(computation[name].shape)
    return min(total, module.shape_bytes(computation[name].shape))


def _written(computation, name):
    """Bytes that become new: of an array that is updated in place, only the update."""
    instruction = computation[name]
    if instruction.opcode == "tuple":
        return sum(_written(computation, operand) for operand in instruction.operands)
    if instruction.opcode == "bitcast":
        return _written(computation, instruction.operands[0])
    if instruction.opcode == "dynamic-update-slice":
        return module.shape_bytes(computation[instruction.operands[1]].shape)
    if instruction.opcode == "scatter":  # what is there is read, changed and written
        return 2 * module.shape_bytes(computation[instruction.operands[2]].shape)
    return module.shape_bytes(instruction.shape)
