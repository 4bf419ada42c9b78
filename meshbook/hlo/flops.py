"""The work in a compiled program: the FLOPs of its matmuls and convolutions.

Elementwise operations are left out: in a transformer they are about a percent, and they are not
what a sharding divides. A matmul counts the same whatever a compiler made of it: a `dot`; on TPU a
`convolution`, with windows and dilations that make most positions empty; a sum of elementwise
products, where one side is a vector. What cannot be counted is an error, never 0.

Source: openxla/xla, `xla/service/hlo_cost_analysis.cc`.
"""

import collections
import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from meshbook.hlo import execution, module, opcodes

PRIMITIVES = ("dot_general", "conv_general_dilated")
RESHAPING = ("bitcast", "convert", "copy", "reshape", "transpose")


def work(compiled: Any, taken: Mapping[str, Sequence[float | int | Fraction]] | None = None):
    """Count the FLOPs of the matmuls and convolutions that each device executes, loops multiplied.

    compiled: `jax.stages.Compiled`, or HLO text. taken: {part of a conditional's op_name, such as
    that of a `jax.named_scope`: share of each branch}, in the order of `jax.lax.switch`, for
    `jax.lax.cond` (false, true); without it the largest branch is taken.

    A matmul of (M, K) and (K, N) is 2·M·K·N FLOPs, a multiplication and an addition each; so is a
    ragged one of (M, K) and (G, K, N), where each row meets one of the G matrices. CPU has no
    ragged matmul: it multiplies every row by all G, and G times as much is counted. Elements that
    are known to be 0 count, also where the compiler folds them into a convolution's padding. A
    convolution in the JAX program counts the window positions that meet an element. Of a matmul
    that became a multiply and a reduce, as with vectors, each multiplication counts 2, unless it
    is a single one. Sorts, FFTs and solvers count 0, but where the compiler expands one into
    matmuls (TPU), those count.

    Raises UnknownTripCount where a loop with matmuls in it does not say how often it turns, and
    ValueError where a matmul may hide: for an opcode or a custom call that is not known, a kernel
    whose work is not in the program's text, and an instruction that was made of a `dot_general`
    of which nothing was counted; also where `taken` does not fit the program's conditionals.

    >>> work(jax.jit(lambda x_MK, w_KN: x_MK @ w_KN).lower(x_MK, w_KN).compile())
    >>> work(compiled, taken={"router": (0.75, 0.25)})
    """
    program = module.parse(compiled)
    callers, seen = _callers(program), {}

    def measure(computation, instruction):
        flops = _flops(program, callers, computation, instruction)
        seen[computation.name, instruction.name] = flops
        return collections.Counter(flops=flops) if flops else None

    flops = execution.tally(program, measure, taken)["flops"]
    _check_all_counted(program, seen)
    return int(flops) if flops == int(flops) else float(flops)


def by_instruction(compiled: Any):
    """{(computation, instruction): FLOPs} of a program's matmuls, each of them run once.

    compiled, what counts, and what is raised: as of `work`.
    """
    program = module.parse(compiled)
    callers = _callers(program)
    found = {(computation.name, each.name): _flops(program, callers, computation, each)
             for computation in program.computations.values()
             for each in computation.instructions.values()}
    _check_all_counted(program, found)
    return {place: flops for place, flops in found.items() if flops}


def _flops(program, callers, computation, instruction):
    """FLOPs of the matmul that one instruction is, 0 for others."""
    opcode = instruction.opcode
    if opcode in ("dot", "scaled-dot"):
        return _dot(computation, instruction)
    if opcode == "ragged-dot":
        return _ragged_dot(computation, instruction)
    if opcode == "convolution":
        return _convolution(computation, instruction)
    if opcode == "custom-call":
        flops = of_custom_call(computation, instruction)
        if flops is None:
            target = instruction.attributes.get("custom_call_target", "").strip('"')
            raise ValueError(
                f"work cannot see into the custom call %{instruction.name} in %{computation.name}: "
                f"expected matmuls that XLA wrote out, or a target of meshbook.hlo.opcodes "
                f"without any; found the kernel {target!r}")
        return flops
    if _of_products(computation, instruction):
        return _elementwise(program, callers, computation, instruction)
    if not opcodes.walked(opcode) and not opcodes.plain(opcode):
        raise ValueError(
            f"work does not know the opcode {opcode} of %{instruction.name} in "
            f"%{computation.name}, which may hide matmuls: expected those of meshbook.hlo.opcodes")
    return 0


def _dot(computation, instruction):
    """2 x the elements of the result x the extent that is summed over."""
    left = computation[instruction.operands[0]].shape
    summed = _numbers(instruction.attributes.get("lhs_contracting_dims", ""))
    return 2 * instruction.shape.size * math.prod(left.dims[at] for at in summed)


def _numbers(text):
    return [int(each) for each in re.findall(r"-?\d+", text)]


def _ragged_dot(computation, instruction):
    """2 x the elements of the left x the extents that only the right has.

    The groups divide one extent of the left, so each of its elements meets one group only: rows
    (M, K) x (G, K, N) -> (M, N); the sum (M, K) x (K, N) -> (G, M, N), a group of K each; or a
    batch (B, M, K) x (B, K, N) -> (B, M, N).
    """
    left, right, groups = (computation[name].shape for name in instruction.operands[:3])
    ragged, summed, *others = (
        _numbers(instruction.attributes.get(key, "")) for key in (
            "lhs_ragged_dims", "lhs_contracting_dims", "rhs_contracting_dims", "rhs_batch_dims",
            "rhs_group_dims"))
    alone = math.prod(extent for at, extent in enumerate(right.dims)
                      if not any(at in dims for dims in others))
    extent = math.prod(left.dims[at] for at in summed)
    result = left.size * alone // extent
    if ragged and ragged[0] in summed:
        result *= groups.dims[-1]
    if len(ragged) != 1 or result != instruction.shape.size:
        raise ValueError(
            f"work cannot count the ragged-dot %{instruction.name} in %{computation.name}: "
            f"expected one ragged extent and by its dimension numbers {result:,} elements in the "
            f"result, found lhs_ragged_dims={ragged} and {instruction.shape.size:,} elements")
    return 2 * left.size * alone


def _convolution(computation, instruction):
    """2 x batch x features in a group x features out x window positions."""
    left, right = (computation[name].shape for name in instruction.operands[:2])
    inputs, kernel, output = re.split(r"_|->", instruction.attributes["dim_labels"])
    window = dict(re.findall(r"(\w+)=(\S+?)(?=[\s}]|$)", instruction.attributes.get("window", "")))
    spatial = sorted(label for label in inputs if label.isdigit())
    extents = [(left.dims[inputs.index(label)], right.dims[kernel.index(label)],
                instruction.shape.dims[output.index(label)]) for label in spatial]
    if instruction.primitive == "dot_general" and all(map(_of_matmul, extents)):
        # each extent is batch, summed or free, and is gone through once, padding included
        positions = math.prod(max(each[1:]) for each in extents)
    else:
        positions = math.prod(_positions(*each, *_window(window, at))
                              for at, each in enumerate(extents))
    groups = int(instruction.attributes.get("feature_group_count", 1))
    batches = int(instruction.attributes.get("batch_group_count", 1))
    return (2 * positions * (left.dims[inputs.index("b")] // batches)
            * (left.dims[inputs.index("f")] // groups) * right.dims[kernel.index("o")])


def _of_matmul(extents):
    """Whether (input, kernel, output) can be one extent of a matmul.

    Where it is batch, or only the right has it, the kernel is as long as the output; where it is
    summed over, the output is 1; where only the left has it, the kernel is 1.
    """
    _, kernel, output = extents
    return kernel == output or 1 in (kernel, output)


def _window(window, at):
    """Stride, padding below, dilation of the input, dilation of the kernel, along one extent."""
    stride, below, spread, step = (
        window.get(key, default).split("x")[at] if key in window else default
        for key, default in (("stride", "1"), ("pad", "0_0"), ("lhs_dilate", "1"),
                             ("rhs_dilate", "1"))
    )
    return int(stride), int(below.split("_")[0]), int(spread), int(step)


@functools.cache
def _positions(length, kernel, output, stride, below, spread, step):
    """How many (place in the output, place in the kernel) pairs read an element of the input."""
    start, count = np.arange(output) * stride - below, 0
    for at in range(kernel):
        place = start + at * step
        count += np.count_nonzero((place >= 0) & (place % spread == 0) & (place // spread < length))
    return int(count)


def of_custom_call(computation: module.Computation, instruction: module.Instruction):
    """FLOPs of a matmul of cuBLAS, oneDNN or libtpu (rows, ragged); 0 without one, None unknown."""
    target = instruction.attributes.get("custom_call_target", "").strip('"')
    left = computation[instruction.operands[0]].shape if instruction.operands else None
    result = instruction.shape[0] if isinstance(instruction.shape, tuple) else instruction.shape
    if target.startswith("__cublas"):
        config = json.loads(instruction.attributes["backend_config"])
        numbers = config.get("gemm_backend_config", config)["dot_dimension_numbers"]
        summed = [int(at) for at in numbers["lhs_contracting_dimensions"]]
    elif target == "__onednn$matmul":
        config = json.loads(instruction.attributes.get("backend_config", "{}"))
        summed = [-2 if config.get("onednn_matmul_config", {}).get("transpose_a") else -1]
    elif "ragged_dot_tiling" in instruction.attributes.get("frontend_attributes", ""):
        # What says where groups begin comes first; rows and matrices are the last two operands.
        left, summed = computation[instruction.operands[-2]].shape, [-1]
    else:
        none = opcodes.plain_target(target) or instruction.op_name == "ragged-dot-metadata"
        return 0 if none else None
    return 2 * result.size * math.prod(left.dims[at] for at in summed)


def _of_products(computation, instruction):
    """Whether XLA made a multiply or a reduce of a matmul.

    Nothing else leaves one that is called dot_general; or transpose, as is a matmul that took in
    the transpose behind it; or that is called nothing and multiplies two broadcast arrays.
    """
    if instruction.opcode == "multiply" and not instruction.op_name:
        return all(computation[name].opcode == "broadcast"
                   and computation[computation[name].operands[0]].shape.dims
                   for name in instruction.operands)
    return (instruction.opcode in ("multiply", "reduce")
            and instruction.primitive in ("dot_general", "transpose"))


def _elementwise(program, callers, computation, instruction):
    """2 x the multiplications of a matmul that became a multiply and a reduce, or one of them.

    Either may have lost the op_name; where both have it, the multiply counts. A multiply of single
    elements is not the matmul's: the partitioner computes with it where a shard begins.
    """
    if instruction.opcode != "reduce":
        return 2 * instruction.shape.size if instruction.shape.size > 1 else 0
    where, summed = _summed(program, callers, computation, instruction.operands[0])
    return 0 if _of_products(where, summed) else 2 * where[summed.name].shape.size


def _summed(program, callers, computation, name):
    """(computation, instruction) that made the elements of a sum, which may go by stages."""
    instruction = computation[name]
    if instruction.opcode == "parameter" and computation.name in callers:
        outer, caller = callers[computation.name]
        return _summed(program, callers, outer, caller.operands[int(instruction.literal)])
    if instruction.opcode == "fusion" and not isinstance(instruction.shape, tuple):
        inner = program.computations[instruction.called("calls")[0]]
        return _summed(program, callers, inner, inner.root)
    stage = instruction.opcode == "reduce-window" or (
        instruction.opcode == "reduce" and not instruction.op_name)
    if stage or instruction.opcode in RESHAPING:
        return _summed(program, callers, computation, instruction.operands[0])
    return computation, instruction


def _callers(program):
    """{name of a computation: (computation, instruction) of the fusion or call that runs it}."""
    return {name: (computation, instruction) for computation in program.computations.values()
            for instruction in computation.instructions.values()
            if instruction.opcode in ("fusion", "call")
            for name in instruction.called("calls", "to_apply")}


def _check_all_counted(program, seen):
    """Raise ValueError where a `dot_general` or convolution left arithmetic, but no FLOPs.

    seen: {(computation, instruction): FLOPs} of all that is executed. What only moves elements
    may well bear the op_name of a matmul.
    """
    names = {program.computations[computation][name].op_name
             for (computation, name), flops in seen.items() if flops}
    for computation, name in seen:
        instruction = program.computations[computation][name]
        if instruction.primitive not in PRIMITIVES or instruction.op_name in names:
            continue
        inside = list(_inside(program, computation, name))
        if not any(seen.get(each) for each in inside) and any(
                _computes(program.computations[where][each]) for where, each in inside):
            raise ValueError(
                f"work counted nothing for {instruction.op_name}, of which %{name} in "
                f"%{computation} is left: expected a matmul or a convolution, or a multiply or a "
                f"reduce of its elements; found {instruction.opcode}")


def _inside(program, computation, name):
    """(computation, name) of an instruction and, where it is a fusion, of all in it."""
    yield computation, name
    for inner in program.computations[computation][name].called("calls"):
        for each in program.computations[inner].instructions:
            yield from _inside(program, inner, each)


def _computes(instruction):
    """Whether it is arithmetic on elements; on a single whole number it is that of an index."""
    shape = instruction.shape
    if isinstance(shape, module.Shape) and shape.size == 1 and shape.dtype[0] in "su":
        return False
    return instruction.opcode not in opcodes.MOVING | opcodes.COLLECTIVE | opcodes.WALKED
