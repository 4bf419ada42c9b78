"""The work in a compiled program: the FLOPs of its matrix products and convolutions.

Elementwise operations are left out: in a transformer they are about a percent, and they are not
what a layout divides. On TPU every product is a convolution, batched ones too, with dilations that
make most window positions empty; only positions that meet an element count, as in XLA's own cost
model, so all backends give the same figure for the same product.

Source: openxla/xla, `xla/service/hlo_cost_analysis.cc`.
"""

import collections
import functools
import json
import math
import re

import numpy as np

from meshbook import programs, tallies

OPAQUE = re.compile(
    r"gemm|matmul|conv(?!ert)|dot|attention|fmha|triton|tpu_custom_call|mosaic", re.IGNORECASE)


def work(compiled):
    """Count the FLOPs of the products that one device executes, loops multiplied.

    compiled: `jax.stages.Compiled`, or HLO text. A product of (M, K) and (K, N) is 2·M·K·N FLOPs, a
    multiplication and an addition each; convolutions count likewise, elementwise work, sorts and
    solvers do not, nor what XLA makes elementwise: a product of two vectors, or one that sums over
    a single number. The largest branch of a conditional is taken.
    Raises UnknownTripCount where a loop with products in it does not say how often it turns, and
    ValueError where a custom kernel hides a product from the program's text.

    >>> work(jax.jit(lambda x_MK, w_KN: x_MK @ w_KN).lower(x_MK, w_KN).compile())
    """
    program = programs.read(compiled)
    return tallies.tally(program, _measure)["flops"]


def _measure(computation, instruction):
    if instruction.opcode == "dot":
        flops = _dot(computation, instruction)
    elif instruction.opcode == "convolution":
        flops = _convolution(computation, instruction)
    elif instruction.opcode == "custom-call":
        flops = _custom_call(computation, instruction)
    else:
        return None
    return None if flops is None else collections.Counter(flops=flops)


def _dot(computation, instruction):
    """2 x the elements of the result x the extent that is summed over."""
    left = computation[instruction.operands[0]].shape
    summed = _numbers(instruction.attributes.get("lhs_contracting_dims", ""))
    return 2 * instruction.shape.size * math.prod(left.dims[at] for at in summed)


def _numbers(text):
    return [int(each) for each in re.findall(r"-?\d+", text)]


def _convolution(computation, instruction):
    """2 x batch x features in a group x features out x window positions that meet an element."""
    left, right = (computation[name].shape for name in instruction.operands[:2])
    inputs, kernel, output = re.split(r"_|->", instruction.attributes["dim_labels"])
    window = dict(re.findall(r"(\w+)=(\S+?)(?=[\s}]|$)", instruction.attributes.get("window", "")))
    spatial = sorted(label for label in inputs if label.isdigit())
    positions = 1
    for at, label in enumerate(spatial):
        extents = (left.dims[inputs.index(label)], right.dims[kernel.index(label)],
                   instruction.shape.dims[output.index(label)])
        positions *= _positions(*extents, *_window(window, at))
    groups = int(instruction.attributes.get("feature_group_count", 1))
    batches = int(instruction.attributes.get("batch_group_count", 1))
    return (2 * positions * (left.dims[inputs.index("b")] // batches)
            * (left.dims[inputs.index("f")] // groups) * right.dims[kernel.index("o")])


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


def _custom_call(computation, instruction):
    """Products that a backend hands to a library: cuBLAS on GPU, oneDNN on CPU."""
    target = instruction.attributes.get("custom_call_target", "").strip('"')
    if target.startswith("__cublas"):
        config = json.loads(instruction.attributes["backend_config"])
        numbers = config.get("gemm_backend_config", config)["dot_dimension_numbers"]
        summed = [int(at) for at in numbers["lhs_contracting_dimensions"]]
    elif target == "__onednn$matmul":
        config = json.loads(instruction.attributes.get("backend_config", "{}"))
        summed = [-2 if config.get("onednn_matmul_config", {}).get("transpose_a") else -1]
    elif OPAQUE.search(target):
        raise ValueError(
            f"work cannot see into the custom call %{instruction.name} in %{computation.name}: "
            f"expected products that XLA wrote out, found the kernel {target!r}")
    else:
        return None
    left, result = computation[instruction.operands[0]].shape, instruction.shape
    result = result[0] if isinstance(result, tuple) else result
    return 2 * result.size * math.prod(left.dims[at] for at in summed)
