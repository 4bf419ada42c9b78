"""What each HLO opcode and each custom call is to somebody who counts matmuls, or times them.

Three kinds for who counts: those that run other computations (WALKED), those in which there is no
matmul (PLAIN) and the matmuls, which `meshbook.hlo.flops` measures. An opcode of a newer compiler
is in none of them.

Source: openxla/xla, `xla/hlo/ir/hlo_opcode.h`.
"""

import re
from collections.abc import Iterable

WALKED = frozenset("fusion call async custom-call conditional while".split())
MOVING = frozenset("""
    add-dependency after-all bitcast bitcast-convert broadcast concatenate constant convert copy
    domain dynamic-reshape dynamic-slice dynamic-update-slice gather get-dimension-size
    get-tuple-element infeed iota opt-barrier optimization-barrier outfeed pad parameter
    partition-id recv recv-done replica-id reshape reverse send send-done set-dimension-size slice
    transpose tuple
""".split())
COLLECTIVE = frozenset("""
    all-gather all-reduce all-to-all collective-broadcast collective-permute ragged-all-to-all
    reduce-scatter
""".split())
ELEMENTWISE = frozenset("""
    abs acos acosh add and asin asinh atan2 atanh cbrt ceil clamp compare complex cosine cosh
    count-leading-zeros divide erf exponential exponential-minus-one floor imag is-finite log
    log-plus-one logistic map maximum minimum multiply negate not or popcnt power real
    reduce-precision remainder round-nearest-afz round-nearest-even rsqrt select shift-left
    shift-right-arithmetic shift-right-logical sign sine sinh sqrt stochastic-convert subtract tan
    tanh xor
""".split())
REDUCING = frozenset("""
    batch-norm-grad batch-norm-inference batch-norm-training reduce reduce-window scatter
    select-and-scatter sort topk
""".split())
RANDOM = frozenset("rng rng-bit-generator rng-get-and-update-state".split())
SOLVING = frozenset("cholesky fft triangular-solve".split())
PRODUCTS = frozenset("convolution dot ragged-dot scaled-dot".split())
SUMS = frozenset({"reduce", "reduce-window"})
TALKING = COLLECTIVE | {"send", "recv"}
MOVES = frozenset("""
    after-all bitcast broadcast concatenate constant copy dynamic-slice dynamic-update-slice
    get-tuple-element infeed outfeed pad parameter partition-id replica-id reshape reverse slice
    transpose tuple
""".split())
PLAIN = MOVING | COLLECTIVE | ELEMENTWISE | REDUCING | RANDOM | SOLVING

TARGETS = re.compile("|".join((
    # where arrays live, how they are cut, and what passes between steps of a program
    "AllocateBuffer|ConcatBitcast|Sharding|SPMD(FullToShard|ShardToFull)Shape|LayoutConstraint",
    "(Local|Global)To(Local|Global)Shape|xla[.]sdy[.].*|annotate_device_placement",
    "MoveTo(Host|Device)|PadToStatic|SliceToDynamic|AsyncCollective(Start|Done)|shape_assertion",
    "X64(Combine|SplitLow|SplitHigh)|AssumeGatherIndicesInBound|GatherScatterIndicesBitpacked",
    # the largest elements, sorting, random bits, host callbacks
    "TopK|PartialReduce|ApproxTopK|__gpu[$]TopK|__cub[$]DeviceRadixSort.*|cu_threefry2x32(_ffi)?",
    "xla_(ffi_)?(partitioned_)?python_(cpu|gpu|tpu)_callback",
    # solvers: LAPACK, cuSOLVER, and the blocks of libtpu's own
    "lapack_\\w+|cusolver_\\w+|cu_lu_pivots_to_permutation|EighTpu|Cholesky|CompactWyHelper",
    "(Qr|Lu)DecompositionBlock|InvertDiagBlocks(Lower|Upper)Triangular",
)))


def walked(opcode: str):
    """Whether an instruction of this opcode runs computations that may hold matmuls.

    Asynchronous instructions run them where they start: async-start, call-start.
    """
    return opcode.removesuffix("-start") in WALKED


def plain(opcode: str):
    """Whether there is no matmul in an instruction of this opcode.

    What ends or updates an asynchronous instruction was counted where that started.
    """
    return opcode.removesuffix("-start") in PLAIN or opcode.endswith(("-done", "-update"))


def known(opcode: str):
    """Whether anything is known of instructions of this opcode."""
    bare = re.sub("-(start|update|done)$", "", opcode)
    return walked(bare) or plain(bare) or bare in PRODUCTS


def plain_target(target: str):
    """Whether there is no matmul in a custom call of this target."""
    return TARGETS.fullmatch(target) is not None


def kind(opcodes: Iterable[str]):
    """What an operation made of these does: "compute", "collective", or "copy" if it only moves.

    A product that carries a collective along is "compute".
    """
    names = {re.sub("-(start|update|done)$", "", name) for name in opcodes}
    if names & TALKING and not names & PRODUCTS:
        return "collective"
    return "copy" if names <= MOVES else "compute"
