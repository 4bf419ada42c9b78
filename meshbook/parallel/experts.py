"""Expert parallelism: MLPs of which each token meets a few, divided over the devices.

Experts are split over a mesh axis, "expert", over which the rows of a batch are split as well. A
device's tokens go to where their experts are, and what experts make of them comes back. There are
two ways. With a capacity each expert has C slots for a row, and slots travel by all-to-all: two in
the forward pass, two in the backward pass. Without one no token is dropped: each device gathers the
tokens of the whole axis, picks those of its experts, and results are summed and scattered.

Hidden units may be split over another axis, "model", as in tensor parallelism; sums over it are
made of tokens that are back, not of slots. The gradient is written out, because JAX cannot
differentiate a shard_map inside another one.

Sources: Shazeer et al. 2017; Lepikhin et al. 2021, "GShard"; Gale et al. 2023, "MegaBlocks".
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Shaped

from meshbook.parallel.grouped import blocks_of, forward_rules, halves, into_hidden, out_of_hidden
from meshbook.sharding import (
    Sharding, axes_of, check_split, shard_map_over_the_rest, summed, varies, varying
)

BLOCK = 128  # slots of a block, whose product is one matmul
Hidden, Choices, Gates = Float[Array, "B T D"], Int[Array, "B T A"], Float[Array, "B T A"]


def expert_parallel(sharding: Sharding, x_BTD: Hidden, slots_BTA: Choices, gates_BTA: Gates,
                    weights: Mapping, capacity: int):
    """What each token's experts make of it, weighted by its gates: (B, T, D), by all-to-all.

    slots_BTA: `routing.slots_of` this capacity C; a choice without a slot adds nothing. weights:
    parameters by their letters, "EDSF" and "EFD" and, where there are biases, "ESF" and "ED"; S is
    2 for SwiGLU and 1 for GELU. The result of an all-to-all has E·b·C·D numbers on each device,
    which has b rows; there is none where the rules do not split E.
    Raises ValueError where the mesh cannot divide experts, or the rules split them and not rows.
    """
    return through_experts(sharding, x_BTD, slots_BTA, gates_BTA, weights, capacity=capacity)


def dropless(sharding: Sharding, x_BTD: Hidden, experts_BTA: Choices, gates_BTA: Gates,
             weights: Mapping, block: int = BLOCK):
    """The same for all choices, experts_BTA of a Routing: none is dropped.

    Products are made in blocks of `block` tokens of one expert. Where E is split n ways, a device
    gathers the tokens of all n, and what its experts make of them is summed and scattered. It has
    buffers for the worst case, in which all of these choices are for its own experts; blocks that
    nothing fills cost memory and no work.
    """
    return through_experts(sharding, x_BTD, experts_BTA, gates_BTA, weights, block=block)


def dispatch(x_SD: Float[Array, "S D"], token_N: Int[Array, "N"]):
    """The tokens of N slots: (N, D), zeros in a slot whose token is S, none."""
    return x_SD.at[token_N].get(mode="fill", fill_value=0)


def combine(y_ND: Float[Array, "N D"], gates_SA: Float[Array, "S A"], slots_SA: Int[Array, "S A"]):
    """For each token the sum of what is in its slots, by gates: (S, D); in slot N is nothing."""
    choices = zip(gates_SA.T, slots_SA.T, strict=True)
    return sum(gate_S[:, None] * dispatch(y_ND, slot_S) for gate_S, slot_S in choices)


@dataclass(frozen=True)
class Layout:
    """The mesh axes that split rows, tokens, experts and hidden units, and how slots are made.

    count: E; capacity: slots of an expert for a row, or 0, and then there are blocks of `block`;
    wide: whether devices' parts of a sum stay float32 until they are added up.
    manual: of these axes those of an enclosing shard_map, in which arrays are a device's own.
    """

    rows: tuple[str, ...]
    tokens: tuple[str, ...]
    experts: tuple[str, ...]
    hidden: tuple[str, ...]
    count: int
    capacity: int
    block: int
    wide: bool
    manual: frozenset

    @property
    def every(self):
        """All of these axes."""
        return tuple(dict.fromkeys(self.rows + self.tokens + self.experts + self.hidden))

    @property
    def shared(self):
        """The axes along which devices gather their tokens, for want of a capacity."""
        return () if self.capacity else self.experts

    @property
    def BT(self):
        """Where tokens lie."""
        return P(*(tuple(axis for axis in axes if axis not in self.manual)
                   for axes in (self.rows, self.tokens)))


def through_experts(sharding: Sharding, x_BTD: Hidden, choices_BTA: Choices, gates_BTA: Gates,
                    weights: Mapping, capacity: int = 0, block: int = 0):
    """`expert_parallel` or `dropless`."""
    check_split("EFD", weights["EFD"].shape, sharding.activation("EFD"))
    B, T, E, F = (axes_of(sharding.activations[letter]) for letter in "BTEF")
    for one, other, inner, outer in ("E", "B", E, B), ("T", "F", T, F):
        if not set(inner) <= set(outer):
            raise ValueError(f"{one} is split over {inner}, and {other} over {outer}: expected "
                             f"{other} to be split over the axes of {one}, too")
    mesh = jax.sharding.get_abstract_mesh()
    manual = frozenset(mesh.manual_axes)
    count = len(weights["EFD"]) * jax.lax.axis_size(tuple(axis for axis in E if axis in manual))
    layout = Layout(B, T, E, F, count, capacity, block, sharding.float32_sums, manual)
    # JAX takes partial sums out of a shard_map that is manual over a whole mesh of several devices
    waits = mesh.size > 1 and not manual
    used = sharding.weight if waits else sharding.gather
    weights = {letters: used(letters, w, x_BTD.dtype) for letters, w in weights.items()}
    tokens = (jax.reshard(each, layout.BT) for each in (x_BTD, choices_BTA, gates_BTA))
    return made_by_experts(layout, *tokens, weights)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def made_by_experts(layout: Layout, *arguments: Any):
    """`expert_parallel` or `dropless`, of arrays that are laid out already."""
    return there_and_kept(layout, *arguments)[0]


def there_and_kept(layout: Layout, x_BTD: Hidden, choices_BTA: Choices, gates_BTA: Gates,
                   weights: dict):
    """The result, and what is kept: what experts were given, hidden units, and what came back."""
    def local(x_bTD, choices_bTA, gates_bTA, weights):
        slots_SA, token_N, owner_n = plan(layout, choices_bTA)
        first, last = halves(weights, layout.every)
        x = to_experts(layout, dispatch(all_tokens(layout, x_bTD), token_N))
        h = forward_rules(partial(into_hidden, owner_n), first, x)
        out = partial(out_of_hidden, layout.hidden, owner_n, wide=layout.wide)
        y = forward_rules(out, last, h)
        y_ND = from_experts(layout, y)
        y_SD = combine(y_ND, all_tokens(layout, gates_bTA), slots_SA)
        kept = jax.tree.map(lambda each: each[None], (x, h, y_ND))
        y_SD = y_SD if layout.wide else y_SD.astype(x_bTD.dtype)
        return scattered(layout, y_SD, x_bTD.shape).astype(x_bTD.dtype), kept

    BT, specs = layout.BT, specs_of(weights)
    run = shard_map_over_the_rest(in_one(local), (BT, BT, BT, specs), (BT, P(layout.every)))
    y_BTD, kept = run(x_BTD, choices_BTA, gates_BTA, jax.tree.map(jax.reshard, weights, specs))
    return y_BTD, (choices_BTA, gates_BTA, weights, kept)


def gradients_of_experts(layout: Layout, arguments: tuple, dy_BTD: Hidden):
    """The gradients of tokens, gates and weights; a weight's is one sum, or waits for it."""
    choices_BTA, gates_BTA, weights, kept = arguments
    waits = {letters: jax.typeof(w).sharding.spec.reduced for letters, w in weights.items()}

    def local(choices_bTA, gates_bTA, weights, kept, dy_bTD):
        slots_SA, token_N, owner_n = plan(layout, choices_bTA)
        x, h, y_ND = (each[0] for each in kept)
        dy_SD, gates_SA = all_tokens(layout, dy_bTD), all_tokens(layout, gates_bTA)
        given_N = per_slot(gates_SA, slots_SA, len(token_N), 0)
        dy_ND = (given_N[:, None] * dispatch(dy_SD, token_N)).astype(x.dtype)
        first, last = halves(weights, layout.every)
        _, back = jax.vjp(partial(out_of_hidden, layout.hidden, owner_n), last, h)
        dlast, dh = back(to_experts(layout, dy_ND))
        _, back = jax.vjp(partial(into_hidden, owner_n), first, x)
        dfirst, dx = back(dh)
        dx_SD = combine(from_experts(layout, dx), jnp.ones_like(gates_SA), slots_SA)
        found_AS = [(dispatch(y_ND, slot_S) * dy_SD.astype(jnp.float32)).sum(-1)
                    for slot_S in slots_SA.T]
        dgates_bTA = scattered(layout, jnp.stack(found_AS, -1), gates_bTA.shape)
        dweights = {letters: summed(dw, replicas[letters], waits[letters])
                    for letters, dw in (dfirst | dlast).items()}
        return scattered(layout, dx_SD.astype(x.dtype), dy_bTD.shape), dgates_bTA, dweights

    BT, specs = layout.BT, specs_of(weights)
    sums = {letters: P(*spec, unreduced=waits[letters]) for letters, spec in specs.items()}
    replicas = {letters: tuple(axis for axis in layout.every  # along which it is the same
                               if axis not in (*flat(spec), *varies(weights[letters])))
                for letters, spec in specs.items()}
    given = BT, BT, specs, P(layout.every), BT
    run = shard_map_over_the_rest(in_one(local), given, (BT, BT, sums))
    weights = jax.tree.map(jax.reshard, weights, specs)
    dx_BTD, dgates_BTA, dweights = run(choices_BTA, gates_BTA, weights, kept, dy_BTD)
    return dx_BTD, None, dgates_BTA, dweights


made_by_experts.defvjp(there_and_kept, gradients_of_experts)


def in_one(local: Callable):
    """The same function, which JAX does not take apart where it is a part of a scan.

    What in it depends on no argument, such as counting, would become a result of the shard_map,
    computed before the scan. That cannot be lowered inside another shard_map. A checkpoint keeps
    its body together; nothing of it is differentiated, so nothing is computed again.
    """
    return jax.checkpoint(local, prevent_cse=False)


def all_tokens(layout: Layout, x_bTD: Shaped[Array, "b T D"]):
    """This device's tokens, and without a capacity those of all that share its experts: (S, D).

    `scattered` is its transpose. Everything varies over all axes: a sum over one is written out.
    """
    if layout.tokens:
        x_bTD = jax.lax.all_gather(x_bTD, layout.tokens, axis=1, tiled=True)
    if layout.shared:
        x_bTD = jax.lax.all_gather(x_bTD, layout.shared, axis=0, tiled=True)
    return varying(x_bTD, layout.every).reshape(-1, x_bTD.shape[-1])


def scattered(layout: Layout, y_SD: Float[Array, "S D"], shape: tuple):
    """What experts and parts of hidden units made, summed, and of the sums this device's tokens."""
    tokens, hidden = layout.tokens, layout.hidden
    y_bTD = y_SD.reshape(-1, shape[1] * jax.lax.axis_size(tokens), shape[2])
    if layout.shared:
        y_bTD = jax.lax.psum_scatter(y_bTD, layout.shared, scatter_dimension=0, tiled=True)
    if tokens:
        y_bTD = jax.lax.psum_scatter(y_bTD, tokens, scatter_dimension=1, tiled=True)
    return summed(y_bTD, tuple(axis for axis in hidden if axis not in tokens))


def to_experts(layout: Layout, x_ND: Float[Array, "N D"]):
    """Slots where their experts are: (n, e, those of one device, D); without a capacity as it is.

    The slots of each of n devices stay together: an order by experts would be a copy on both sides.
    Where nothing travels they are (E, S, D).
    """
    if not layout.capacity:
        return x_ND
    x_ESD = x_ND.reshape(layout.count, -1, x_ND.shape[-1])
    if not layout.experts:
        return x_ESD
    n = jax.lax.axis_size(layout.experts)
    return exchanged(layout, x_ESD.reshape(n, -1, *x_ESD.shape[1:]))


def exchanged(layout: Layout, x_nESD: Float[Array, "n E S D"]):
    """What lies at i on device j lies at j on device i afterwards."""
    return jax.lax.all_to_all(x_nESD, layout.experts, 0, 0, tiled=True)


def from_experts(layout: Layout, y: Float[Array, "... D"]):
    """What experts made where the tokens are: (N, D)."""
    if layout.capacity and layout.experts:
        y = exchanged(layout, y)
    return y.reshape(-1, y.shape[-1])


def plan(layout: Layout, choices_bTA: Int[Array, "b T A"]):
    """Slots of choices (S, A), tokens of slots (N,), and experts of blocks, if there are blocks."""
    choices_SA, owner_n = all_tokens(layout, choices_bTA), None
    if C := layout.capacity:  # slots of an expert stand together: (E, b, C), not (b, E, C)
        b, E = len(choices_bTA), layout.count
        row_S1 = (jnp.arange(len(choices_SA)) // (len(choices_SA) // b))[:, None]
        expert_SA, place_SA = choices_SA // C, choices_SA % C
        slots_SA, count = (expert_SA * b + row_S1) * C + place_SA, E * b * C
        slots_SA = jnp.where(expert_SA < E, slots_SA, count)
    else:
        e = layout.count // jax.lax.axis_size(layout.experts)
        first = jax.lax.axis_index(layout.shared) * e
        slots_SA, owner_n = blocks_of(choices_SA - first, e, layout.block)
        count = len(owner_n) * layout.block
    S = len(slots_SA)
    token_SA = jnp.broadcast_to(jnp.arange(S)[:, None], slots_SA.shape)
    return slots_SA, per_slot(token_SA, slots_SA, count, S), owner_n


def per_slot(x_SA: Shaped[Array, "S A"], slots_SA: Int[Array, "S A"], count: int, empty: int):
    """What choices have, by their slots: (N,), and what empty slots have."""
    return jnp.full(count, empty, x_SA.dtype).at[slots_SA].set(x_SA, mode="drop")


def flat(spec: P):
    """The mesh axes that split anything by this spec."""
    return tuple(jax.tree.leaves(tuple(spec.partitions)))


def specs_of(weights: Mapping):
    """How weights are split."""
    return {letters: P(*jax.typeof(w).sharding.spec.partitions) for letters, w in weights.items()}
