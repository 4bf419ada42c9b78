"""A layer of experts by dispatch: value and gradients on one device, in turns in one process.

One-hot dispatch multiplies tokens by a one-hot (B, T, E, C), and what experts made by the same
times the gates (Lepikhin et al. 2021, "GShard"). It has the same slots as this book's capacity and
drops the same choices, so results are equal. Work is counted in the compiled programs.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from benchmarks.decoder_runs import begin, in_turns, rows_of
from helpers import sized
from meshbook.parallel.experts import BLOCK, dropless, expert_parallel
from meshbook.parallel.grouped import activated
from meshbook.parallel.routing import capacity, route, slots_of
from meshbook.proofs import work
from meshbook.sharding import Sharding, make_mesh, shard_map_over_the_rest

ROUNDS, ACTIVE, FACTOR = 7, 2, 1.25
FULL = {"B": 8, "T": 2048, "D": 1024, "F": 2048, "E": 32, "dtype": "bfloat16"}  # one accelerator
LAPTOP = {"B": 4, "T": 1024, "D": 256, "F": 512, "E": 16}
TEST = {"B": 2, "T": 32, "D": 16, "F": 32, "E": 4}
APART = {"float32": 1e-5, "bfloat16": 3e-2}  # how far apart two ways' results may be, relatively
RULES = Sharding.none().also(E=None)
ONE_HOT = "one-hot dispatch"


def one_hot(x_BTD, routing, weights, slots):
    """The layer by products with one-hots."""
    E = len(weights["EFD"])
    slot_BTA = slots_of(routing.experts_BTA, E, slots)
    hot_BTANC = slot_BTA[..., None] == jnp.arange(E * slots)
    mask_BTEC = hot_BTANC.any(2).astype(x_BTD.dtype).reshape(*x_BTD.shape[:2], E, slots)
    gates_BTN = jnp.where(hot_BTANC, routing.gates_BTA[..., None], 0).sum(2)
    x_EBCD = jnp.einsum("BTEC,BTD->EBCD", mask_BTEC, x_BTD)
    h_EBCSF = jnp.einsum("EBCD,EDSF->EBCSF", x_EBCD, weights["EDSF"])
    y_EBCD = jnp.einsum("EBCF,EFD->EBCD", activated(h_EBCSF), weights["EFD"])
    return jnp.einsum("BTEC,EBCD->BTD", gates_BTN.reshape(mask_BTEC.shape), y_EBCD)


def by_capacity(x_BTD, routing, weights, slots):
    """This book's, with a capacity."""
    slot_BTA = slots_of(routing.experts_BTA, len(weights["EFD"]), slots)
    return expert_parallel(RULES, x_BTD, slot_BTA, routing.gates_BTA, weights, slots)


def by_blocks(x_BTD, routing, weights, _):
    """This book's, of all choices."""
    return dropless(RULES, x_BTD, routing.experts_BTA, routing.gates_BTA, weights, BLOCK)


def by_ragged_dot(x_BTD, routing, weights, _):
    """All choices, sorted, with JAX's product for groups, which is dense on a CPU."""
    (E, D, S, F), chosen_N = weights["EDSF"].shape, routing.experts_BTA.reshape(-1)
    order_N = jnp.argsort(chosen_N)
    token_N = order_N // routing.experts_BTA.shape[-1]
    sizes_E = jnp.bincount(chosen_N, length=E)
    product = shard_map_over_the_rest(jax.lax.ragged_dot, (P(), P(), P()), P())
    h_NF = product(x_BTD.reshape(-1, D)[token_N], weights["EDSF"].reshape(E, D, S * F), sizes_E)
    y_ND = product(activated(h_NF.reshape(-1, S, F)), weights["EFD"], sizes_E)
    y_ND = y_ND * routing.gates_BTA.reshape(-1)[order_N][:, None].astype(y_ND.dtype)
    y_SD = jnp.zeros_like(x_BTD).reshape(-1, D).at[token_N].add(y_ND)
    return y_SD.reshape(x_BTD.shape)


WAYS = {ONE_HOT: one_hot, "slots of a capacity": by_capacity, "blocks, none dropped": by_blocks,
        "ragged_dot, none dropped": by_ragged_dot}


def shapes(B, T, D, F, E):
    """The shapes of what a layer is given: tokens, the router, the weights of experts."""
    return (B, T, D), (D, E), {"EDSF": (E, D, 2, F), "EFD": (E, F, D)}


def loss_by(way, T, E):
    """A function of these arrays: a layer by one way, its results squared."""
    slots = capacity(FACTOR, T, ACTIVE, E)

    def loss(x_BTD, w_router_DE, weights):
        logits_BTE = jnp.einsum("BTD,DE->BTE", x_BTD, w_router_DE,
                                preferred_element_type=jnp.float32)
        y_BTD = WAYS[way](x_BTD, route(logits_BTE, ACTIVE), weights, slots)
        return jnp.square(y_BTD.astype(jnp.float32)).mean()

    return loss


class Layer:
    """Value and gradients of a layer by one way: layer(count) runs it so many times."""

    def __init__(self, way, dtype="float32", **sizes):
        drawn, (x, w_router, weights) = np.random.default_rng(0), shapes(**sizes)
        normal = lambda shape: (
            drawn.standard_normal(shape, np.float32) / shape[-2] ** 0.5).astype(jnp.dtype(dtype))
        weights = {letters: normal(shape) for letters, shape in weights.items()}
        self.arguments = normal(x) * np.asarray(x[1] ** 0.5, dtype), normal(w_router), weights
        mesh = make_mesh((1, 1))
        with jax.set_mesh(mesh):
            loss = loss_by(way, sizes["T"], sizes["E"])
            step = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
            self.arguments = jax.device_put(self.arguments, jax.NamedSharding(mesh, P()))
            self.program = step.lower(*self.arguments).compile()

    def __call__(self, count):
        for _ in range(count):
            found = self.program(*self.arguments)
        return jax.block_until_ready(found)


def useful(B, T, D, F, E, dtype="float32"):
    """FLOPs of the products of all choices, three matrices each, and of the router; and backward."""
    return 3 * (B * T * ACTIVE * 2 * D * F * 3 + B * T * 2 * D * E)


def noted(program, **sizes):
    """What a program computes and needs. On a GPU its products are calls that nobody counts."""
    memory = f"{program.memory_analysis().temp_size_in_bytes / 1e6:,.0f} MB of temporaries"
    if jax.default_backend() == "gpu":
        return [memory]
    return [f"{work(program) / useful(**sizes):.2f} of the useful work", memory]


def measured(rounds=ROUNDS, **sizes):
    """Rows: each way."""
    layers, most = {way: Layer(way, **sizes) for way in WAYS}, APART[sizes.get("dtype", "float32")]
    for one, other in ((ONE_HOT, "slots of a capacity"),
                       ("blocks, none dropped", "ragged_dot, none dropped")):
        for found, expected in zip(*(jax.tree.leaves(layers[way](1)) for way in (one, other)),
                                   strict=True):
            found, expected = (np.asarray(each, np.float32) for each in (found, expected))
            apart = np.linalg.norm(found - expected) / np.linalg.norm(expected)
            assert apart < most, (one, other, apart)
    notes = {way: noted(layer.program, **sizes) for way, layer in layers.items()}
    return rows_of(in_turns(layers, rounds, count=1), ONE_HOT, notes=notes)


def run():
    """One size."""
    begin(1)
    return measured(**sized(full=FULL, laptop=LAPTOP, test=TEST))


if __name__ == "__main__":
    for row in run():
        print(row)
