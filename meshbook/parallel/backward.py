"""A function and its gradient in three parts: its result, its input's gradient, its weights'.

A backward pass makes two things, and a pipeline waits for one of them only: the gradient of the
input, which the stage before needs. `in_three` writes the function and both gradients down as
equations (a jaxpr) and deals them out. What the result needs is the forward pass F; what the
input's gradient needs besides is B; and what is left is W. Between them wait the results of matmuls
and of collectives, so that none is made twice. What is cheap is made of them again where it is
needed: elementwise results, and casts and slices of weights.

Source: Qi et al. 2023, "Zero bubble pipeline parallelism" (B and W apart).
"""
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

INLINED = {"jit", "remat2", "checkpoint", "closed_call", "custom_jvp_call"}  # dealt out inside, too
KEPT = {  # what later parts do not repeat
    "dot_general", "conv_general_dilated", "shard_map", "scan", "while", "cond", "random_bits",
    "optimization_barrier", "psum", "psum_invariant", "pmax", "all_gather", "all_gather_invariant",
    "reduce_scatter", "all_to_all", "ppermute"}


class Part(NamedTuple):
    """One of the three: its equations, the variables that they read, and those that they make."""
    equations: list[JaxprEqn]
    reads: list[Var]
    makes: list[Var | Literal]


@dataclass(frozen=True)
class Three:
    """The three parts of a function, and what its variables are.

    parts: by kind, F, B and W. Each makes what it is for, and after that what later ones read of
    it. weights, own: lists; dx: a list of one, or of none where x is no float. tree: of weights.
    """
    parts: dict[str, Part]
    weights: list[Var]
    own: list[Var]
    x: Var
    dy: Var
    y: Var | Literal
    dx: list[Var | Literal]
    dweights: list[Var | Literal]
    constants: Mapping[Var, Any]
    tree: Any

    def forward(self, weights: Any, own: tuple, x: Any):
        """(y, kept): the result, and a list of what the gradients will need."""
        made = {self.x: x} | self.made("F", weights, own, {self.x: x})
        return made[self.y], [made[v] for v in self.left("F")]

    def of_input(self, weights: Any, own: tuple, kept: list, dy: Any):
        """(dx, more): the input's gradient, and what else the weights' gradient will need."""
        known = dict(zip(self.left("F"), kept, strict=True)) | {self.dy: dy}
        made = {self.dy: dy} | self.made("B", weights, own, known)
        return made[self.dx[0]], [made[v] for v in self.left("B")]

    def of_weights(self, weights: Any, own: tuple, kept: list, more: list):
        """The gradient of the weights."""
        known = dict(zip(self.left("F") + self.left("B"), kept + more, strict=True))
        made = self.made("W", weights, own, known)
        return self.tree.unflatten([made[v] for v in self.dweights])

    def left(self, kind: str):
        """The variables of F or B that later parts read, with what it was given."""
        given, later = (self.x, "BW") if kind == "F" else (self.dy, "W")
        reads = {v for each in later for v in self.parts[each].reads}
        return [v for v in dict.fromkeys([given, *self.parts[kind].makes]) if v in reads]

    def made(self, kind: str, weights: Any, own: tuple, known: Mapping):
        """{variable: value} of what a part makes of what it is given."""
        known = known | dict(zip(self.weights + self.own, jax.tree.leaves((weights, own))))
        part = self.parts[kind]
        return dict(zip(part.makes, solved(part.equations, known | self.constants, part.makes)))


def in_three(function: Callable, weights: Any, x: Any, *own: Any):
    """The Three of y = function(weights, x, ...own), of arrays like these; own has no gradient."""
    floats = jnp.issubdtype(x.dtype, jnp.floating)  # tokens have no gradient

    def whole(weights, own, x, dy):
        given = (weights, x) if floats else (weights,)
        y, back = jax.vjp(lambda weights, x=x: function(weights, x, *own), *given)
        dweights, *dx = back(dy)
        return y, *dx, *jax.tree.leaves(dweights)

    flat, tree = jax.tree.flatten((weights, own, x, jax.eval_shape(function, weights, x, *own)))
    traced = jax.make_jaxpr(lambda *flat: whole(*tree.unflatten(flat)))(*flat)
    traced = jax.make_jaxpr(partial(outputs, traced))(*flat)
    count, (*given, x, dy) = len(jax.tree.leaves(weights)), traced.jaxpr.invars
    y, *gradients = traced.jaxpr.outvars
    dx, dweights = gradients[:floats], gradients[floats:]
    parts = dealt_out(traced.jaxpr.eqns, {"F": [y], "B": dx, "W": dweights}, {*given, x, dy})
    return Three(parts, given[:count], given[count:], x, dy, y, dx, dweights,
                 dict(zip(traced.jaxpr.constvars, traced.consts)), jax.tree.structure(weights))


def dealt_out(equations: Sequence[JaxprEqn], aims: Mapping[str, list], known: set[Var]):
    """{kind: Part}, one for each aim in turn; each knows what those before it have kept."""
    dealt, later, parts = {}, set(), {}
    for kind, makes in aims.items():
        own, reads = needed(equations, makes, known)
        kept = [v for each in own for v in each.outvars if each.primitive.name in KEPT]
        dealt[kind] = own, reads, kept
        known = known | {*kept}
    for kind, (own, reads, kept) in reversed(dealt.items()):
        more = [v for v in kept if v in later and v not in aims[kind]]
        parts[kind] = Part(own, list(reads), [*aims[kind], *more])
        later |= reads
    return {kind: parts[kind] for kind in aims}


def needed(equations: Sequence[JaxprEqn], makes: Iterable[Var | Literal], known: set[Var]):
    """The equations that make something of what is known, and what of that they read."""
    found, wanted = [], {v for v in makes if isinstance(v, Var)}
    for each in reversed(equations):
        if any(v in wanted and v not in known for v in each.outvars):
            found.append(each)
            wanted |= {v for v in each.invars if isinstance(v, Var)}
    return found[::-1], wanted & known


def outputs(traced: ClosedJaxpr, *flat: Any):
    """What equations make of their inputs, one by one, those of calls, too."""
    known = dict(zip(traced.jaxpr.constvars, traced.consts))
    known |= dict(zip(traced.jaxpr.invars, flat, strict=True))
    return solved(traced.jaxpr.eqns, known, traced.jaxpr.outvars)


def solved(equations: Iterable[JaxprEqn], known: Mapping, wanted: Sequence[Var | Literal]):
    """The values of the wanted variables, by these equations in order."""
    known = dict(known)
    value = lambda atom: atom.val if isinstance(atom, Literal) else known[atom]
    for each in equations:
        inputs = [value(atom) for atom in each.invars]
        with each.ctx.manager:  # the axes of the mesh may be of another type here
            found = bound(each, inputs)
        known |= dict(zip(each.outvars, found, strict=True))
    return [value(atom) for atom in wanted]


def bound(equation: JaxprEqn, inputs: list):
    """The results of one equation; of a call those of its own equations."""
    if equation.primitive.name in INLINED:
        inner = equation.params.get("jaxpr") or equation.params["call_jaxpr"]
        return outputs(inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ()), *inputs)
    params = equation.primitive.get_bind_params(equation.params)
    found = equation.primitive.bind(*inputs, **params)
    return found if equation.primitive.multiple_results else [found]
