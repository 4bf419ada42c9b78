"""A function and its gradient in three programs: its result, its input's gradient, its weights'.

A backward pass makes two things, and a pipeline waits for one of them only: the gradient of the
input, which the stage before needs. `in_three` writes the function and both gradients down as
equations (a jaxpr) and deals them out. What the result needs is the forward pass F; of what is
left, what the input's gradient needs is B; the rest is W. No equation is in two of them, except for
those that depend on weights alone, such as a cast.

Source: Qi et al. 2023, "Zero bubble pipeline parallelism" (B and W apart).
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
from jax.extend import core

INLINED = {"jit", "remat2", "closed_call", "custom_jvp_call"}  # calls whose equations are dealt out


def in_three(function: Callable, weights: Any, x: Any, *own: Any):
    """The Three of function(weights, x, *own) -> y, for arrays like these; own has no gradient."""
    def whole(weights, own, x, dy):
        y, back = jax.vjp(lambda weights, x: function(weights, x, *own), weights, x)
        dweights, dx = back(dy)
        return y, dx, dweights

    flat, tree = jax.tree.flatten((weights, own, x, jax.eval_shape(function, weights, x, *own)))
    traced = jax.make_jaxpr(lambda *flat: whole(*tree.unflatten(flat)))(*flat)
    inlined = jax.make_jaxpr(partial(outputs, traced))(*flat)
    return Three(inlined, jax.tree.structure(weights))


def outputs(traced: core.ClosedJaxpr, *flat: Any):
    """What equations make of their inputs, one by one, those of calls, too."""
    known = dict(zip(traced.jaxpr.constvars, traced.consts))
    known |= dict(zip(traced.jaxpr.invars, flat, strict=True))
    return solved(traced.jaxpr.eqns, known, traced.jaxpr.outvars)


def solved(equations: Iterable, known: Mapping, wanted: Sequence):
    """The values of the wanted variables, by these equations in order."""
    known = dict(known)
    value = lambda var: var.val if isinstance(var, core.Literal) else known[var]
    for each in equations:
        inputs = [value(var) for var in each.invars]
        if each.primitive.name in INLINED:
            inner = each.params.get("jaxpr") or each.params["call_jaxpr"]
            closed = inner if isinstance(inner, core.ClosedJaxpr) else core.ClosedJaxpr(inner, ())
            found = outputs(closed, *inputs)
        else:
            found = each.primitive.bind(*inputs, **each.params)
            found = found if each.primitive.multiple_results else [found]
        known |= dict(zip(each.outvars, found, strict=True))
    return [value(var) for var in wanted]


@dataclass(frozen=True)
class Three:
    """The equations of a function and of both gradients, dealt out to F, B and W.

    traced: (*weights, *own, x, dy) -> (y, dx, *gradients of the weights); tree: of the weights.
    """

    traced: core.ClosedJaxpr
    tree: Any

    def forward(self, weights: Any, own: tuple, x: Any):
        """(y, kept): the result, and a list of what the gradients will need."""
        y, *kept = self.run(self.shares[0], weights, own, {self.x: x}, [self.y, *self.kept])
        return y, kept

    def of_input(self, weights: Any, own: tuple, kept: list, dy: Any):
        """(dx, more): the input's gradient, and what else the weights' gradient will need."""
        known = dict(zip(self.kept, kept, strict=True)) | {self.dy: dy}
        dx, *more = self.run(self.shares[1], weights, own, known, [self.dx, *self.more])
        return dx, more

    def of_weights(self, weights: Any, own: tuple, kept: list, more: list):
        """The gradient of the weights."""
        known = dict(zip(self.kept + self.more, kept + more, strict=True))
        return self.tree.unflatten(self.run(self.shares[2], weights, own, known, self.dweights))

    def run(self, share: set, weights: Any, own: tuple, known: Mapping, wanted: Sequence):
        """What the equations of a share, and those without x and dy, make of what is known."""
        jaxpr = self.traced.jaxpr
        known = known | dict(zip(jaxpr.constvars, self.traced.consts))
        known |= dict(zip(jaxpr.invars, jax.tree.leaves((weights, own))))  # all but x and dy
        chosen = [each for at, each in enumerate(jaxpr.eqns) if at in share | self.fixed]
        return solved(chosen, known, wanted)

    x = property(lambda self: self.traced.jaxpr.invars[-2])
    dy = property(lambda self: self.traced.jaxpr.invars[-1])
    y = property(lambda self: self.traced.jaxpr.outvars[0])
    dx = property(lambda self: self.traced.jaxpr.outvars[1])
    dweights = property(lambda self: self.traced.jaxpr.outvars[2:])

    @cached_property
    def shares(self):
        """Which equations are F's, B's and W's, by number."""
        first = self.needed([self.y]) - self.fixed
        second = self.needed([self.dx]) - self.fixed - first
        return first, second, self.needed(self.dweights) - self.fixed - first - second

    @cached_property
    def fixed(self):
        """The equations that depend neither on x nor on dy: solved wherever they are needed."""
        changing, found = {self.x, self.dy}, set()
        for at, each in enumerate(self.traced.jaxpr.eqns):
            if changing & variables(each.invars):
                changing |= {*each.outvars}
            else:
                found.add(at)
        return found

    @cached_property
    def kept(self):
        """The variables that F makes, or is given, and B or W reads."""
        first, second, third = self.shares
        return self.made(first, [self.x], second | third, [self.dx, *self.dweights])

    @cached_property
    def more(self):
        """The variables that B makes, or is given, and W reads."""
        _, second, third = self.shares
        return self.made(second, [self.dy], third, self.dweights)

    def made(self, share: set, given: list, later: set, wanted: Sequence):
        """Variables of one share of the equations that later ones read, or that are wanted."""
        eqns = self.traced.jaxpr.eqns
        read = variables(var for at in later for var in eqns[at].invars) | variables(wanted)
        own = [*given, *(var for at in sorted(share) for var in eqns[at].outvars)]
        return [var for var in own if var in read]

    def needed(self, wanted: Sequence):
        """Which equations it takes to find the wanted variables, by number."""
        wanted, found = variables(wanted), set()
        for at, each in reversed([*enumerate(self.traced.jaxpr.eqns)]):
            if wanted & {*each.outvars}:
                found.add(at)
                wanted |= variables(each.invars)
        return found


def variables(found: Iterable):
    """The variables among inputs of equations, without numbers that are written in them."""
    return {var for var in found if not isinstance(var, core.Literal)}
