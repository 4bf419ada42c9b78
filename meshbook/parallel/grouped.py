"""Products of slots with the matrices of their experts, and blocks of one expert each.

Tokens of the same expert stand together, and every expert's tokens are filled up to whole blocks.
A block is one product with one matrix, so no token is dropped, whatever the router does, and the
work that is added is less than one block for each expert.

Source: Gale et al. 2023, "MegaBlocks: efficient sparse training with mixture-of-experts".
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from meshbook.sharding import varying


def blocks_of(experts_SA: Int[Array | np.ndarray, "S A"], experts: int, block: int):
    """Where each choice stands if experts have whole blocks: (slots (S, A), experts of blocks).

    experts: E; a number that is not in 0 to E - 1 is no choice. block: slots of a block. There are
    floor((S·A + E·(block - 1)) / block) blocks, enough for any choices; those that are not needed
    have expert E. No choice has the slot after the last one. Raises ValueError for an empty block.
    """
    if block < 1:
        raise ValueError(f"expected blocks of 1 or more slots; found {block}")
    count = (experts_SA.size + experts * (block - 1)) // block
    chosen_N = experts_SA.reshape(-1)
    is_NE = chosen_N[:, None] == jnp.arange(experts)
    place_NE = jnp.cumsum(is_NE, 0) - is_NE
    ends_E = jnp.cumsum(-(-is_NE.sum(0) // block))
    starts_E = jnp.concatenate([jnp.zeros_like(ends_E[:1]), ends_E[:-1]])
    slot_N = jnp.where(is_NE, starts_E * block + place_NE, 0).sum(-1)
    slot_N = jnp.where(is_NE.any(-1), slot_N, count * block)
    expert_n = (jnp.arange(count)[:, None] >= ends_E).sum(-1)
    return slot_N.reshape(experts_SA.shape), expert_n


@jax.custom_vjp
def grouped_matmul(x_ND: Float[Array, "N D"], w_EDF: Float[Array, "E D F"],
                   expert_n: Int[Array, "n"]):
    """Rows times the matrices of their blocks' experts: (N, F), and 0 for blocks of no expert.

    Rows are n blocks of N / n; expert_n: the expert of each, E for a block that is not computed.
    """
    return grouped_forward(x_ND, w_EDF, expert_n)[0]


def grouped_forward(x_ND: Float[Array, "N D"], w_EDF: Float[Array, "E D F"],
                    expert_n: Int[Array, "n"]):
    """The product, and what the backward pass needs; a checkpoint's policy sees the matmuls here.

    One that called grouped_matmul would hide them, and what a policy keeps would be made twice.
    """
    E, _, F = w_EDF.shape

    def one(block):
        x_bD, expert = block
        return if_needed(expert < E, lambda: x_bD @ w_EDF[expert])

    y_NF = jax.lax.map(one, (in_blocks(x_ND, expert_n), expert_n)).reshape(-1, F)
    return y_NF, (x_ND, w_EDF, expert_n)


def grouped_backward(kept: tuple, dy_NF: Float[Array, "N F"]):
    """Rows' gradients are products with the transposed matrices; a matrix sums its blocks'."""
    x_ND, w_EDF, expert_n = kept
    E, D, F = w_EDF.shape

    def turn(dw_EDF, block):
        x_bD, dy_bF, expert = block
        more_DF = if_needed(expert < E, lambda: jnp.einsum(
            "bD,bF->DF", x_bD, dy_bF, preferred_element_type=jnp.float32))
        return dw_EDF.at[expert].add(more_DF, mode="drop"), None

    zeros_EDF = zeros_like(jax.eval_shape(lambda: dy_NF[0, 0] * w_EDF.astype(jnp.float32)))
    parts = in_blocks(x_ND, expert_n), in_blocks(dy_NF, expert_n), expert_n
    dw_EDF, _ = jax.lax.scan(turn, zeros_EDF, parts)
    dx_ND = grouped_matmul(dy_NF, w_EDF.swapaxes(1, 2), expert_n)
    return dx_ND, dw_EDF.astype(w_EDF.dtype), None


grouped_matmul.defvjp(grouped_forward, grouped_backward)


def forward_rules(function: Callable, *arguments: Any):
    """function(*arguments), with what its custom_vjps do forward in their place.

    A checkpoint's policy does not look into a custom_vjp that is not differentiated, and in the
    forward rule of another one none is.
    """
    return jax.vjp(function, *arguments)[0]


def in_blocks(x_ND: Float[Array, "N D"], expert_n: Int[Array, "n"]):
    """Rows as (n, N / n, D)."""
    return x_ND.reshape(len(expert_n), -1, x_ND.shape[1])


def if_needed(needed: Bool[Array, ""], make: Callable):
    """What `make` makes, or zeros like it, and then it is not done."""
    return jax.lax.cond(needed, make, lambda: zeros_like(jax.eval_shape(make)))


def zeros_like(made: jax.ShapeDtypeStruct):
    """Zeros of this type, which inside a shard_map vary over the same mesh axes."""
    zeros, inside = jnp.zeros(made.shape, made.dtype), made.manual_axis_type
    return jax.lax.pcast(zeros, tuple(inside.varying), to="varying") if inside else zeros


def activated(h: Float[Array, "... S F"]):
    """Hidden units (..., F): silu of the first part times the second, or GELU of a single one."""
    first, *second = (h[..., part, :] for part in range(h.shape[-2]))
    return jax.nn.silu(first) * second[0] if second else jax.nn.gelu(first)


def halves(weights: Mapping, axes: tuple[str, ...]):
    """The weights before the hidden units and those after, `varying` along these axes."""
    return [{letters: varying(w, axes) for letters, w in weights.items()
             if (letters[-1] == "D") == after} for after in (False, True)]


def into_hidden(owner_n: Int[Array, "n"] | None, weights: Mapping, x: Float[Array, "... D"]):
    """Hidden units before they are activated: (..., S, F)."""
    w_EDSF = weights["EDSF"]
    if owner_n is None:
        h = jnp.einsum("...EbD,EDSF->...EbSF", x, w_EDSF)
        return h if "ESF" not in weights else h + weights["ESF"][:, None]
    e, D, *SF = w_EDSF.shape
    b_EF = weights["ESF"].reshape(e, -1) if "ESF" in weights else None
    h = multiplied_by_expert(owner_n, x, w_EDSF.reshape(e, D, -1), b_EF)
    return h.reshape(*h.shape[:-1], *SF)


def out_of_hidden(axes: tuple[str, ...], owner_n: Int[Array, "n"] | None, weights: Mapping,
                  h: Float[Array, "... S F"], wide: bool = False):
    """What experts make: (..., D), a part of a sum where mesh axes split the hidden units.

    wide: in float32, so that the sum is rounded once and not each part. Of factors that are cast,
    because XLA's CPU has no product of bfloat16 by experts that would be float32.
    """
    b_ED, a, w_EFD = weights.get("ED"), activated(h), weights["EFD"]
    if b_ED is not None and axes:
        b_ED = jnp.where(jax.lax.axis_index(axes) == 0, b_ED, 0)  # once in the sum
    if wide:
        a, w_EFD = a.astype(jnp.float32), w_EFD.astype(jnp.float32)
    return multiplied_by_expert(owner_n, a, w_EFD, b_ED)


def multiplied_by_expert(owner_n: Int[Array, "n"] | None, x: Float[Array, "... D"],
                         w_EDF: Float[Array, "E D F"], b_EF: Float[Array, "E F"] | None):
    """Slots times the matrices of their experts, plus biases: (..., E, b, F); blocks: (N, F)."""
    if owner_n is None:
        y = jnp.einsum("...EbD,EDF->...EbF", x, w_EDF)
        return y if b_EF is None else y + b_EF[:, None]
    y_NF = grouped_matmul(x, w_EDF, owner_n)
    if b_EF is None:
        return y_NF
    bias_nF = b_EF.at[owner_n].get(mode="fill", fill_value=0)
    return (y_NF.reshape(len(owner_n), -1, y_NF.shape[-1]) + bias_nF[:, None]).reshape(y_NF.shape)
