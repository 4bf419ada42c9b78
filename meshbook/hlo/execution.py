"""Add up what one device executes of a compiled program, loops multiplied.

`tally` walks a program from ENTRY through fusions and calls, the body of a loop
times its trip count, the branches of a conditional by the shares that the caller
gives, or else the largest. The trip count is the
compiler's own note (`known_trip_count`, on CPU and GPU) or, where there is none
(TPU), found by turning the loop's counter: start, step and bound are constants
that reach it through tuples, copies and fusions.
"""

import collections
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from meshbook.hlo.module import Computation, Instruction, Module

MOST_TRIPS = 1_000_000


class UnknownTripCount(ValueError):
    """A loop holds something that is counted, and how often it turns is not in the program."""


def tally(program: Module, measure: Callable,
          taken: Mapping[str, Sequence[float | int | Fraction]] | None = None):
    """Add up `measure` over everything that one device executes.

    measure(computation, instruction) returns a Counter, which is taken as it is, or None:
    then the computations that the instruction calls are walked. A loop counts its body once
    for every turn. A conditional counts its largest branch, whichever way the data would send
    it; or, where `taken` names it, each branch times its share.
    taken: {part of the conditional's op_name, or its name in the program: shares}, one share for
    each branch in the order of `jax.lax.switch`, for `jax.lax.cond` (false, true).
    Raises UnknownTripCount, naming the loop, and ValueError where `taken` does not fit the
    program's conditionals, saying which there are.
    """
    entry, shares = program.computations[program.entry], _shares(program, taken or {})
    return _walk(program, measure, shares, entry, nothing)


def _shares(program, taken):
    """{name of a conditional: share of each branch} for the conditionals that `taken` names."""
    shares = {}
    for each, key in named_conditionals(program, taken):
        given = taken[key]
        if len(given) != len(branches_of(each)):
            raise ValueError(f"taken[{key!r}]: expected {len(branches_of(each))} shares, one "
                             f"for each branch, found {given}; {_listed(_conditionals(program))}")
        if min(given) < 0 or not math.isclose(sum(given), 1):
            raise ValueError(f"taken[{key!r}]: expected shares from 0 to 1 that sum to 1, found "
                             f"{given}, which sum to {sum(given)}")
        shares[each.name] = given
    return shares


def named_conditionals(program: Module, taken: Mapping):
    """(conditional, key) for each that a key of `taken` names, by its name or part of its op_name.

    Raises ValueError for a key that names none, and for two keys that name the same one.
    """
    keys, found = {}, _conditionals(program)
    for key in taken:
        named = [each for each in found if key == each.name or key and key in each.op_name]
        if not named:
            raise ValueError(f"taken: expected keys that name a conditional; found {key!r}, and "
                             f"{_listed(found)}")
        for each in named:
            if each.name in keys:
                raise ValueError(f"taken: expected one key for each conditional; found another one "
                                 f"for %{each.name}, {key!r}")
            keys[each.name] = each, key
    return list(keys.values())


def _conditionals(program):
    return [instruction for computation in program.computations.values()
            for instruction in computation.instructions.values()
            if instruction.opcode == "conditional"]


def _listed(conditionals):
    said = [f"%{each.name} ({each.op_name or 'no op_name'}), {len(branches_of(each))} branches"
            for each in conditionals]
    return "the program has " + ("; ".join(said) or "no conditional")


def branches_of(instruction: Instruction):
    """Names of a conditional's branches, that for index 0 or false first."""
    return instruction.called("branch_computations", "false_computation", "true_computation")


def _walk(program, measure, shares, computation, given):
    total = collections.Counter()
    for instruction in computation.instructions.values():
        counted = measure(computation, instruction)
        if counted is None:
            counted = _inside(program, measure, shares, computation, instruction, given)
        total.update(counted)
    return total


def _inside(program, measure, shares, computation, instruction, given):
    """What the computations that one instruction calls add up to."""
    visit = lambda name, given: _walk(
        program, measure, shares, program.computations[name], given)
    if instruction.opcode.removesuffix("-start") in ("fusion", "call", "async", "custom-call"):
        names = instruction.called("calls", "to_apply", "called_computations")
        own = handed(program, computation, instruction, given)
        return sum((visit(name, own) for name in names), collections.Counter())
    if instruction.opcode == "conditional":
        branches = [visit(name, nothing) for name in branches_of(instruction)]
        if instruction.name in shares:
            return _mixed(branches, shares[instruction.name])
        return max(branches, key=lambda branch: branch.total())
    if instruction.opcode == "while":
        return _loop(visit, loop(program, computation, instruction, given))
    return collections.Counter()


def nothing(number: int, path: tuple):
    """Of no parameter is a value known: what a computation is given that is looked at alone."""


def handed(
    program: Module, computation: Computation, instruction: Instruction, given: Callable
):
    """What an instruction gives to the computation that it calls: a function (number, path)."""
    return lambda number, path: _value(
        program, computation, instruction.operands[number], path, given)


class Loop(NamedTuple):
    """A loop: names of its body and its condition, what both are given, a function of no arguments
    that says how often the body runs (raises UnknownTripCount).
    """

    body: str
    condition: str
    given: Callable
    trips: Callable


def loop(program: Module, computation: Computation, instruction: Instruction, given: Callable):
    """The Loop that an instruction is, in a computation that is given these values."""
    body, condition = instruction.called("body")[0], instruction.called("condition")[0]
    own = handed(program, computation, instruction, given)
    kept = lambda number, path: own(0, path) if _passes_through(program, body, path) else None
    return Loop(body, condition, kept, lambda: _trip_count(program, computation, instruction, own))


def _mixed(branches, shares):
    """The mean of what the branches count, each weighted with its share."""
    mean = collections.Counter()
    for branch, share in zip(branches, shares, strict=True):
        mean.update({key: share * count for key, count in branch.items() if share * count})
    return mean


def _loop(visit, found):
    turns, tests = visit(found.body, found.given), visit(found.condition, found.given)
    if not turns and not tests:
        return turns
    trips = found.trips()
    # The condition is asked once more than the body runs: the last answer ends the loop.
    return collections.Counter(
        {key: trips * turns[key] + (trips + 1) * tests[key] for key in turns | tests})


def _passes_through(program, body, path):
    """Whether a turn of the loop leaves this element of its state as it was."""
    mark = lambda number, path: ("state", path)
    computation = program.computations[body]
    return _value(program, computation, computation.root, path, mark) == ("state", path)


def _trip_count(program, computation, instruction, own):
    """How often a loop turns: as the compiler notes it, or by turning its counter."""
    known = re.search(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)', instruction.attributes.get(
        "backend_config", ""))
    if known:
        return int(known[1])
    body, condition = (program.computations[instruction.called(key)[0]]
                       for key in ("body", "condition"))
    state = lambda number, path: own(0, path)
    for trips in range(MOST_TRIPS):
        goes_on = _value(program, condition, condition.root, (), state)
        if goes_on is None or isinstance(goes_on, tuple):
            break
        if not goes_on:
            return trips
        state = _next_state(program, body, state)
    raise UnknownTripCount(
        f"the loop %{instruction.name} in %{computation.name} holds collectives or matrix "
        "products, and its trip count cannot be found: expected a known_trip_count or a counter "
        f"with constant start, step and bound, found the condition %{condition.root} = "
        f"{condition[condition.root].opcode} in %{condition.name}"
    )


def _next_state(program, body, state):
    """The state after one more turn, each element computed once, when it is asked for."""
    seen = {}

    def after(number, path):
        if path not in seen:
            seen[path] = _value(program, body, body.root, path, state)
        return seen[path]

    return after


ARITHMETIC = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul,
    "minimum": min, "maximum": max, "and": operator.and_, "or": operator.or_,
}
COMPARE = {"LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge,
           "EQ": operator.eq, "NE": operator.ne}
SAME = ("copy", "bitcast", "convert", "reshape", "optimization-barrier", "copy-done")


def _value(program, computation, name, path, given):
    """The integer that an instruction yields at a path into its tuple, or None if unknown.

    given(number, path) answers for the parameters of the computation.
    """
    instruction = computation[name]
    ask = lambda at, path=(): _value(program, computation, instruction.operands[at], path, given)
    opcode = instruction.opcode
    if opcode == "parameter":
        return given(int(instruction.literal), path)
    if opcode == "constant":
        return {"true": 1, "false": 0}.get(instruction.literal) if not re.fullmatch(
            r"-?\d+", instruction.literal) else int(instruction.literal)
    if opcode == "get-tuple-element":
        return ask(0, (int(instruction.attributes["index"]), *path))
    if opcode == "tuple":
        return ask(path[0], path[1:]) if path else None
    if opcode in SAME:
        return ask(0, path)
    if opcode == "copy-start":  # (the copy, what is copied, a handle)
        return ask(0) if path == (0,) else None
    if opcode in ("fusion", "call"):
        callee = program.computations[instruction.called("calls", "to_apply")[0]]
        return _value(program, callee, callee.root, path, lambda number, path: ask(number, path))
    if opcode == "while":
        kept = _passes_through(program, instruction.called("body")[0], path)
        return ask(0, path) if kept else None
    if opcode in ARITHMETIC or opcode == "compare":
        sides = ask(0), ask(1)
        if any(not isinstance(side, int) for side in sides):
            return None
        return (ARITHMETIC.get(opcode) or COMPARE[instruction.attributes["direction"]])(*sides)
    return None
