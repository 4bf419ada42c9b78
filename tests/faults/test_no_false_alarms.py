"""A hundred correct programs of random meshes, layouts and sizes: no proof may complain.

A residual MLP with a position embedding, by three means (Auto, Explicit, by hand) and three
layouts (data, tensor, fully sharded), in a list of blocks or a scan over them, against the same on
one device. Letters: B batch, T tokens, D embed, F hidden, L blocks.
"""

import functools
import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from properties import examples

from meshbook import proofs

# B, T, D, F. On every mesh a product sums over two numbers or more; over one, XLA makes none.
SIZES = ((8, 4, 8, 16), (16, 3, 16, 32), (16, 1, 32, 16), (24, 5, 8, 40), (32, 2, 24, 48))
MESHES = ((8, 1), (4, 2), (2, 4), (1, 8), (2, 2), (1, 2), (4, 1))
RATE, STEPS = 0.1, 20


def mesh_of(shape, kind):
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    return Mesh(devices, ("batch", "model"), axis_types=(kind,) * 2)


def specs_of(layout, blocks, scanned):
    """The place of every parameter: w_in by columns over 'model', w_out by rows."""
    model, batch = (None if layout == "data" else "model"), ("batch" if layout == "full" else None)
    block = {"w_in": (batch, model), "w_out": (model, batch)}
    if scanned:
        stack = {name: P(None, *spec) for name, spec in block.items()}
    else:
        stack = [{name: P(*spec) for name, spec in block.items()}] * blocks
    return {"position": P(), "blocks": stack}


@functools.cache
def weights(sizes, blocks, scanned):
    (_, T, D, F), draw = sizes, np.random.default_rng(0).normal
    make = lambda *shape: (draw(size=shape) / shape[-2] ** 0.5).astype(np.float32)
    layers = [{"w_in": make(D, F), "w_out": make(F, D)} for _ in range(blocks)]
    stack = jax.tree.map(lambda *each: np.stack(each), *layers) if scanned else layers
    return {"position": make(T, D), "blocks": stack}


@functools.cache
def batch_of(sizes, number):
    x = np.random.default_rng(number).normal(size=sizes[:3]).astype(np.float32)
    return {"x": x, "y": np.tanh(x[..., ::-1])}


def block_auto(w, x):
    return x + jax.nn.relu(x @ w["w_in"]) @ w["w_out"]


def block_explicit(w, x):
    h = jnp.einsum("btd,df->btf", x, w["w_in"], out_sharding=P("batch", None, "model"))
    return x + jnp.einsum("btf,fd->btd", jax.nn.relu(h), w["w_out"], out_sharding=P("batch"))


def block_by_hand(layout, w, x):
    if layout == "full":
        w = {"w_in": jax.lax.all_gather(w["w_in"], "batch", axis=0, tiled=True),
             "w_out": jax.lax.all_gather(w["w_out"], "batch", axis=1, tiled=True)}
    y = jax.nn.relu(x @ w["w_in"]) @ w["w_out"]
    return x + (y if layout == "data" else jax.lax.psum(y, "model"))


def loss_with(block):
    def loss(params, batch):
        x = batch["x"] + params["position"]
        if isinstance(params["blocks"], dict):
            x, _ = jax.lax.scan(lambda x, w: (block(w, x), None), x, params["blocks"])
        else:
            for w in params["blocks"]:
                x = block(w, x)
        return jnp.mean((x - batch["y"]) ** 2)

    return loss


def value_and_grad(mesh, means, layout, specs):
    if means == "by hand":
        local = loss_with(functools.partial(block_by_hand, layout))
        axes = ("batch", "model") if layout == "data" else ("batch",)
        mean = lambda params, batch: jax.lax.pmean(local(params, batch), axes)
        if layout == "data":  # rows over both axes, so that 'model' has its share of the work
            return jax.shard_map(jax.value_and_grad(mean), mesh=mesh,
                                 in_specs=(specs, P(("batch", "model"))), out_specs=(P(), specs))
        return jax.shard_map(jax.value_and_grad(mean), mesh=mesh, in_specs=(specs, P("batch")),
                             out_specs=(P(), specs))
    return jax.value_and_grad(loss_with(block_auto if means == "auto" else block_explicit))


def step_with(value_and_grad):
    def step(params, batch):
        loss, gradients = value_and_grad(params, batch)
        after = jax.tree.map(lambda p, g: p - RATE * g, params, gradients)
        return after, {"loss": loss, "gradients": gradients}

    return step


def predicted(mesh, layout, sizes, blocks, scanned):
    """{(kind, axes): (count, bytes)}: partial sums forward and back, gradients, loss; gathers."""
    (B, T, D, F), (batch, model) = sizes, mesh.devices.shape
    axes = ("batch",)
    if layout == "data":
        axes = tuple(name for name in mesh.axis_names if mesh.shape[name] > 1)
        batch, model = batch * model, 1
    local, moved = 2 * D * F // model * blocks, {}
    if model > 1:
        moved["all-reduce", "model"] = 2 * blocks, 2 * blocks * 4 * (B // batch) * T * D
    if batch > 1 and layout == "full":
        moved["all-gather", axes] = 2 * blocks, 4 * local
        moved["reduce-scatter", axes] = 2 * blocks, 4 * local // batch
        moved["all-reduce", axes] = 1, 4 * (T * D + 1)
    elif batch > 1:
        count = 1 + blocks * (scanned and blocks > 1)  # a block's own, within the loop
        moved["all-reduce", axes] = count, 4 * (local + T * D + 1)
    return moved


def held_by_each(mesh, layout, sizes, blocks):
    """Bytes of parameters on each device."""
    (_, T, D, F), (batch, model) = sizes, mesh.devices.shape
    ways = {"data": 1, "tensor": model, "full": model * batch}[layout]
    return 4 * (T * D + 2 * D * F * blocks // ways)


@functools.cache
def single(sizes, blocks, scanned):
    """The reference on one device, compiled."""
    step = jax.jit(step_with(jax.value_and_grad(loss_with(block_auto))), donate_argnums=0)
    return step.lower(weights(sizes, blocks, scanned), batch_of(sizes, 0)).compile()


def run(step, state, place):
    return proofs.Run(
        lambda state, batch: step(state, place(batch)), state,
        gradients=lambda state, batch: step(state, place(batch))[1]["gradients"],
        params=lambda state: state)


@examples(100)
@given(shape=st.sampled_from(MESHES), sizes=st.sampled_from(SIZES), blocks=st.integers(1, 2),
       scanned=st.booleans(), program=st.sampled_from([
           ("auto", "tensor"), ("explicit", "tensor"), ("by hand", "tensor"),
           ("by hand", "data"), ("by hand", "full")]))
def test_correct_programs_pass_all_proofs(shape, sizes, blocks, scanned, program):
    means, layout = program
    mesh = mesh_of(shape, AxisType.Explicit if means == "explicit" else AxisType.Auto)
    specs = specs_of(layout, blocks, scanned)
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    rows = NamedSharding(mesh, P(("batch", "model")) if layout == "data" else P("batch"))
    place = lambda batch: jax.device_put(batch, rows)
    state = jax.device_put(weights(sizes, blocks, scanned), places)
    with jax.set_mesh(mesh):
        step = jax.jit(step_with(value_and_grad(mesh, means, layout, specs)), donate_argnums=0,
                       out_shardings=(places, {"loss": None, "gradients": places}))
        compiled = step.lower(state, place(batch_of(sizes, 0))).compile()
    batches = [batch_of(sizes, number) for number in range(STEPS)]
    reference = jax.device_put(weights(sizes, blocks, scanned), jax.devices()[0])

    proofs.assert_same_training(
        run(compiled, state, place),
        run(single(sizes, blocks, scanned), reference, lambda batch: batch), batches)
    proofs.assert_communicates(compiled, mesh, predicted(mesh, layout, sizes, blocks, scanned))
    B, T, D, F = sizes
    proofs.assert_divided(compiled, mesh.size, useful=12 * B * T * D * F * blocks)
    after, _ = compiled(state, place(batches[0]))
    whole = jax.device_get(after)
    proofs.assert_sharded(after, specs, mesh, held_by_each(mesh, layout, sizes, blocks), whole)
    proofs.assert_sharded(after, places)
    proofs.assert_replicas_equal(after)
    proofs.assert_donated(compiled, held_by_each(mesh, layout, sizes, blocks))


@st.composite
def placed(draw):
    """An array of any rank and dtype on a mesh of one to three axes, somehow split."""
    shape = draw(st.sampled_from([(8,), (4, 2), (2, 2), (2, 2, 2), (1, 8), (2, 1, 4)]))
    names = ("a", "b", "c")[: len(shape)]
    devices = np.array(draw(st.permutations(jax.devices()))[: math.prod(shape)]).reshape(shape)
    mesh = Mesh(devices, names, axis_types=(AxisType.Auto,) * len(shape))
    free, spec = list(draw(st.permutations(names))), []
    for _ in range(draw(st.integers(0, 4))):
        taken = [free.pop() for _ in range(draw(st.integers(0, min(2, len(free)))))]
        spec.append(tuple(taken) if len(taken) > 1 else taken[0] if taken else None)
    extents = [math.prod(mesh.shape[a] for a in (e if isinstance(e, tuple) else (e,) if e else ()))
               * draw(st.integers(1, 3)) for e in spec]
    extents += draw(st.lists(st.integers(0, 3), max_size=2))
    dtype = draw(st.sampled_from([np.float32, np.int8, jnp.bfloat16, bool]))
    numbers = np.random.default_rng(0).integers(0, 2, extents).astype(dtype)
    return jax.device_put(numbers, NamedSharding(mesh, P(*spec))), mesh, P(*spec)


@examples(100)
@given(st.lists(placed(), min_size=1, max_size=3))
def test_any_placement_is_found_where_it_was_put(leaves):
    tree = {"leaves": [array for array, _, _ in leaves]}
    proofs.assert_sharded(tree, {"leaves": [NamedSharding(m, spec) for _, m, spec in leaves]})
    for array, mesh, spec in leaves:
        proofs.assert_sharded([array], spec)
        proofs.assert_sharded(array, spec, mesh)
    proofs.assert_replicas_equal(tree)
    table = proofs.sharding_table(tree)
    held = dict.fromkeys(jax.devices(), 0)
    for array in tree["leaves"]:
        for shard in array.addressable_shards:
            held[shard.device] += shard.data.nbytes
    assert all(held[device] == count for device, count in table.bytes_by_device.items())
    assert table.bytes == max(held.values())
    assert sum(table.bytes_by_device.values()) == sum(held.values())


@pytest.mark.parametrize("means", ("auto", "explicit", "by hand"))
def test_the_same_run_twice_is_the_same_bit_for_bit(means):
    sizes = SIZES[0]
    mesh = mesh_of((4, 2), AxisType.Explicit if means == "explicit" else AxisType.Auto)
    specs = specs_of("tensor", 2, False)
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    with jax.set_mesh(mesh):
        step = jax.jit(step_with(value_and_grad(mesh, means, "tensor", specs)), donate_argnums=0)
    place = lambda batch: jax.device_put(batch, NamedSharding(mesh, P("batch")))

    def stepped(state, batch):
        with jax.set_mesh(mesh):
            return step(state, place(batch))

    state = jax.device_put(weights(sizes, 2, False), places)
    verdict = proofs.assert_same_training(
        (stepped, state), (stepped, state), [batch_of(sizes, n) for n in range(5)], rtol=0)
    assert verdict.loss_difference == 0
