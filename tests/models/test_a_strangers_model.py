"""A model with dimensions of its own, experts E and layers L, on a mesh with axes of its own.

Nothing of it is known to the package: it adds its rules in one expression, and passes the proofs.
"""
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.nn.initializers import variance_scaling

from meshbook import proofs
from meshbook.models.layers import parameter
from meshbook.sharding import Sharding, make_mesh
from meshbook.training import abstract_state, compile_step, create_state, run

L, E, B, D, F, C = 2, 4, 16, 8, 32, 6
AXES = ("stage", "batch", "expert", "model")
RULES = Sharding.tensor_parallel().also(E="expert", L=None, parameters={"L": "stage"})
STORED = {"E": "expert", "L": "stage", "F": "model"}  # written down once more
KEY = jax.random.key(7)


class Experts(nnx.Module):
    """The mean of E small MLPs, L times with a residual connection: (B, D) to logits (B, C)."""

    def __init__(self, rules, *, rngs):
        config = SimpleNamespace(param_dtype=jnp.float32)
        draw = variance_scaling(1.0, "fan_in", "uniform")  # bit-equal on every mesh; normal is not
        make = lambda letters, *shape: parameter(letters, shape, draw, rngs, config, rules)
        self.w_in_LEDF = make("LEDF", L, E, D, F)
        self.w_out_LEFD = make("LEFD", L, E, F, D)
        self.w_head_DC = make("DC", D, C)
        self.rules = rules

    def __call__(self, x_BD, key=None):
        rules, split = self.rules, self.rules.activation
        w_in_LEDF = rules.gather("LEDF", self.w_in_LEDF[...], x_BD.dtype)
        w_out_LEFD = rules.gather("LEFD", self.w_out_LEFD[...], x_BD.dtype)
        w_head_DC = rules.gather("DC", self.w_head_DC[...], x_BD.dtype)
        for w_in_EDF, w_out_EFD in zip(w_in_LEDF, w_out_LEFD):
            h_BEF = jnp.einsum("BD,EDF->BEF", x_BD, w_in_EDF, out_sharding=split("BEF"))
            y_BD = jnp.einsum("BEF,EFD->BD", jax.nn.gelu(h_BEF), w_out_EFD,
                              out_sharding=split("BD"))
            x_BD = x_BD + y_BD / E
        return jnp.einsum("BD,DC->BC", x_BD, w_head_DC, out_sharding=split("BC"))


def batch(seed):
    draw = np.random.default_rng(seed)
    return {"inputs": draw.normal(size=(B, D)).astype(np.float32),
            "labels": draw.integers(0, C, B).astype(np.int32)}


BATCHES = [batch(seed) for seed in range(4)]


def state_on(shape, optimizer, rules=RULES):
    return create_state(lambda: Experts(rules, rngs=nnx.Rngs(0)), optimizer,
                        make_mesh(shape, AXES))


def weights(shape):
    """How many parameters one device holds."""
    stages, _, experts, ways = shape
    return 2 * L * E * D * F // (stages * experts * ways) + D * C


def traffic(shape):
    """What the step must exchange: result bytes of float32, by kind and axes.

    A product that sums over E and F adds up along the axis of each, one after the other.
    """
    stages, rows, experts, ways = shape
    gathered = 2 * L * E * D * F // (experts * ways)
    sums = 2 * L - 1, 4 * (2 * L - 1) * (B // rows) * D
    moved = {("all-reduce", axis): sums
             for axis, size in (("expert", experts), ("model", ways)) if size > 1}
    count = 1 if stages == 1 else None  # the compiler merges what is ready at the same time
    moved["all-reduce", "batch"] = count, 4 * (gathered + D * C + 2)
    return moved | ({("all-gather", "stage"): (2, 4 * gathered)} if stages > 1 else {})


def work(shape):
    """(useful FLOPs of a step, how often they are done): 6L - 1 products of experts, 3 of the head.

    The stages only store: each does all layers. The head is done by all devices that share rows.
    """
    stages, _, experts, ways = shape
    mlps, head = (6 * L - 1) * 2 * B * E * D * F, 3 * 2 * B * D * C
    done = stages * (mlps + experts * ways * head)
    return mlps + head, done / (mlps + head)


@pytest.mark.parametrize("shape", [(2, 2, 2, 1), (1, 2, 2, 2), (2, 2, 1, 2)])
def test_it_passes_the_four_proofs(shape):
    plain = optax.sgd(0.05, momentum=0.0)
    state = state_on(shape, plain)
    single = state_on((1, 1, 1, 1), plain, Sharding.none().also(E=None, L=None))
    program = compile_step(state, state.program.place(BATCHES[0]), KEY)
    mesh, arrays = state.program.mesh, (state.params, state.opt_state)
    held = 2 * 4 * weights(shape)
    proofs.assert_sharded(arrays, proofs.by_letters(arrays, STORED), mesh, held,
                          jax.device_get((single.params, single.opt_state)))
    proofs.assert_same_training(run(state, KEY, program), run(single, KEY), BATCHES)
    proofs.assert_communicates(program, mesh, traffic(shape))
    useful, factor = work(shape)
    proofs.assert_divided(program, mesh.size, useful, factor, rtol=1e-9)
    proofs.assert_donated(program, held + 4)


def test_without_arrays_it_is_the_same_program():
    make, optimizer = (lambda: Experts(RULES, rngs=nnx.Rngs(0))), optax.sgd(0.05, momentum=0.0)
    mesh, rows = make_mesh((2, 2, 2, 1), AXES), ("batch", "expert")
    made, shapes = (each(make, optimizer, mesh, rows=rows)
                    for each in (create_state, abstract_state))
    assert shapes.program.ways == made.program.ways == 4
    for one, other in zip(*map(jax.tree.leaves, (made, shapes)), strict=True):
        assert (one.shape, one.dtype, one.sharding) == (other.shape, other.dtype, other.sharding)


def test_a_size_that_its_axis_cannot_divide_is_refused_by_its_letter():
    with pytest.raises(ValueError, match="LEDF.*: E=4 does not divide over mesh axis 'expert' of "
                                         "size 8"):
        state_on((1, 1, 8, 1), optax.sgd(0.1))


def test_a_rule_of_an_axis_that_the_mesh_does_not_have_is_refused():
    with pytest.raises(ValueError, match="to be split over mesh axis 'tensor', but the mesh has"):
        state_on((2, 2, 2, 1), optax.sgd(0.1), RULES.also(F="tensor"))
