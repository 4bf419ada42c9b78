"""Programs that went wrong: each trains on eight devices, and looks as if all were well.

Each is one of meshbook.faults.right_programs with a line or two changed; meshbook.faults tells how
people come to it, and which proof must notice.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from meshbook.faults import right_programs as right
from meshbook.faults.networks import (
    B, CHUNKS, D, F, MICROBATCHES, SPECS, T, Specimen, initial_weights, mesh_of, squared_error,
    step_traffic,
)


def _auto(loss=squared_error, shape=(4, 2), **changes):
    """A specimen that leaves the collectives to the compiler."""
    mesh = mesh_of(*shape)
    return Specimen(mesh, jax.value_and_grad(loss), step_traffic(mesh), **changes)


def _hand(local, check_vma=True, **changes):
    """A specimen whose collectives are written out."""
    mesh = mesh_of(4, 2)
    return Specimen(mesh, right.by_hand(mesh, local, check_vma), step_traffic(mesh), **changes)


# Where things live --------------------------------------------------------------------------------

def changed_spec():
    """`w_out` split by columns, like `w_in`: one spec is wrong."""
    return _auto(specs={**SPECS, "w_out": P(None, "model")})


def annotated_weights(mesh: Mesh):
    """Weights that Flax is told to split, and does not: the annotation is a note."""
    weights = initial_weights()

    def layer(name, spec):
        init = nnx.with_partitioning(lambda *_: jnp.asarray(weights[name]), spec)
        sizes = dict(use_bias=False, kernel_init=init, rngs=nnx.Rngs(0))
        return nnx.Linear(*weights[name].shape, **sizes)

    with nnx.use_eager_sharding(False), jax.set_mesh(mesh):
        layers = {"w_in": layer("w_in", (None, "model")), "w_out": layer("w_out", ("model", None))}
    return {name: layer.kernel.get_value() for name, layer in layers.items()}


def idle_annotation():
    """The sources' trap: jit then copies to every device what lies on one."""
    return _auto(specs={"w_in": P(), "w_out": P()}, start=annotated_weights)


def whole_moment():
    """The moment of `w_in` made with zeros_like outside jit, and never split."""
    return _auto(moments={**SPECS, "w_in": P()})


def whole_frozen_weight():
    """A frozen weight kept whole, and cut where it is used: right numbers, twice the memory."""
    frozen = right.right_frozen()
    columns = frozen.sharding(SPECS["w_in"])

    def loss(params, batch):
        w_in_DF = jax.lax.with_sharding_constraint(params["w_in"], columns)
        return right.frozen_error({**params, "w_in": w_in_DF}, batch)

    return dataclasses.replace(frozen, specs={**SPECS, "w_in": P()},
                               value_and_grad=jax.value_and_grad(loss))


def moved_shards():
    """Everything on a mesh whose devices are counted column by column."""
    turned = Mesh(np.array(jax.devices()[:8]).reshape(2, 4).T, ("batch", "model"))
    return _auto(lie_on=turned)


def own_seeds(mesh: Mesh):
    """Every row of devices draws its own weights; the result is declared a copy."""
    def draw(weights):
        at = jax.lax.axis_index("batch")
        return jax.tree.map(lambda w: w * (1 + 0.01 * at), weights)

    return jax.jit(jax.shard_map(draw, mesh=mesh, in_specs=(SPECS,), out_specs=SPECS,
                                 check_vma=False))(initial_weights())


def drifting_copies():
    """Copies that were never copies."""
    return _hand(right.averaged, start=own_seeds)


def kept_state():
    """A jit without donate_argnums: the old state stays beside the new one."""
    return _auto(donate=())


def whole_batch():
    """The batch not split: every device row works on all of it."""
    return _auto(rows=P())


# What is computed ---------------------------------------------------------------------------------

def off_by_a_thousandth():
    """A mean over n - 16 numbers instead of n: the loss is a thousandth too large."""
    return _auto(lambda params, batch: squared_error(params, batch) * (1 + 16 / (B * T * D - 16)))


def dropout_left_on():
    """A tenth of the hidden activations dropped, where the reference keeps them all."""
    def loss(params, batch):
        kept = jax.random.bernoulli(jax.random.key(0), 0.9, (B, T, F)) / 0.9
        y_BTD = batch["x"] + (jax.nn.relu(batch["x"] @ params["w_in"]) * kept) @ params["w_out"]
        return jnp.mean((y_BTD - batch["y"]) ** 2)

    return _auto(loss)


def unchecked_gradients():
    """check_vma=False: the transpose of a psum is another psum."""
    return _hand(right.averaged, check_vma=False)


def sum_for_mean():
    """Gradients summed over 'batch': four times too large."""
    def local(params, batch):
        loss, gradients = jax.value_and_grad(right.local_error)(right.varying(params), batch)
        return jax.lax.pmean(loss, "batch"), jax.lax.psum(gradients, "batch")

    return _hand(local)


def scaled_gradients():
    """Gradients four times too large under Adam, which divides by their size."""
    def value_and_grad(params, batch):
        loss, gradients = jax.value_and_grad(squared_error)(params, batch)
        return loss, jax.tree.map(lambda g: 4 * g, gradients)

    return dataclasses.replace(right.right_adam(), value_and_grad=value_and_grad)


def unsummed_gradients():
    """Each row of devices keeps the gradient of its own rows; the copies part."""
    def local(params, batch):
        loss, gradients = jax.value_and_grad(right.local_error)(right.varying(params), batch)
        return jax.lax.pmean(loss, "batch"), gradients

    return _hand(local, check_vma=False)


def local_norm():
    """Gradients clipped by the norm of the slice that a device holds."""
    def local(params, batch):
        return right.clipped(lambda squares: squares, right.averaged(params, batch))

    return dataclasses.replace(right.right_clipped(),
                               value_and_grad=right.by_hand(mesh_of(4, 2), local))


def stale_order():
    """The sharded run resumed one batch late."""
    return _auto(order=lambda number: number + 1)


# What is exchanged --------------------------------------------------------------------------------

def extra_psum():
    """The activations summed, and averaged once more to be safe."""
    def error(params, batch):
        y_bTD = jax.lax.psum(jax.nn.relu(batch["x"] @ params["w_in"]) @ params["w_out"], "model")
        again = jax.lax.pmean(jax.lax.pcast(y_bTD, "model", to="varying"), "model")
        return jax.lax.pmean(jnp.mean((batch["x"] + again - batch["y"]) ** 2), "batch")

    return _hand(jax.value_and_grad(error))


def missing_psum():
    """The partial sum of y taken for the whole; a mean of the losses quiets the type checker."""
    def local(params, batch):
        h_bTf = jax.nn.relu(batch["x"] @ params["w_in"])
        y_bTD = batch["x"] + h_bTf @ params["w_out"]
        return jax.lax.pmean(jnp.mean((y_bTD - batch["y"]) ** 2), ("batch", "model"))

    return _hand(jax.value_and_grad(local))


def summed_for_gathered():
    """A weight gathered as a sum of slices with zeros around them: twice the bytes on the wire."""
    def gather(w_df):
        mine = jnp.arange(4)[:, None, None] == jax.lax.axis_index("batch")
        return jax.lax.psum(jnp.where(mine, w_df, 0).reshape(D, -1), "batch")

    return right.with_gather(gather)


def gathered_for_summed():
    """The weights gathered along 'model', where y should be summed: as many bytes, by chance."""
    def local(params, batch):
        axes = {"w_in": 1, "w_out": 0}
        gather = partial(jax.lax.all_gather, axis_name="model", tiled=True)
        whole = {name: gather(w, axis=axes[name]) for name, w in params.items()}
        loss, gradients = jax.value_and_grad(squared_error)(whole, batch)
        at, cut = jax.lax.axis_index("model") * (F // 2), jax.lax.dynamic_slice_in_dim
        own = {name: cut(g, at, F // 2, axes[name]) for name, g in gradients.items()}
        return jax.lax.pmean((loss, own), "batch")

    return _hand(local, check_vma=False)


def sent_past_the_program():
    """The targets come from a teacher on a mesh of its own: there and back by device_put."""
    teacher = NamedSharding(mesh_of(2, 4), P("batch"))
    targets = jax.jit(lambda x: jnp.tanh(2 * jnp.roll(x, 1, -1)), out_shardings=teacher)

    def feed(batch):
        y_BTD = jax.device_put(targets(jax.device_put(batch["x"], teacher)), batch["y"].sharding)
        return {**batch, "y": y_BTD}

    return _auto(feed=feed)


def reduced_in_the_loop():
    """Microbatches under Auto: the gradients are summed over 'batch' in every turn."""
    def loss_and_gradients(params, batch):
        cut = jax.tree.map(lambda rows: rows.reshape(-1, 4, T, D).swapaxes(0, 1), batch)
        return _microbatches(params, cut)

    return dataclasses.replace(right.right_accumulated(), value_and_grad=loss_and_gradients)


def _microbatches(params, cut):
    """Loss and gradients, a microbatch at a time."""
    def turn(total, batch):
        return jax.tree.map(jnp.add, total, jax.value_and_grad(squared_error)(params, batch)), None

    start = jax.tree.map(jnp.zeros_like, (jnp.float32(0), params))
    total, _ = jax.lax.scan(turn, start, cut)
    return jax.tree.map(lambda sums: sums / len(cut["x"]), total)


def gathered_weights():
    """The residual's tokens split over 'model', what lies between left to the compiler."""
    rows = NamedSharding(mesh_of(4, 2), P("batch", "model"))

    def pin(x):
        return jax.lax.with_sharding_constraint(x, rows)

    def loss(params, batch):
        x_BTD = pin(batch["x"])
        y_BTD = pin(x_BTD + jax.nn.relu(x_BTD @ params["w_in"]) @ params["w_out"])
        return jnp.mean((y_BTD - pin(batch["y"])) ** 2)

    return _auto(loss)


# How much is done ---------------------------------------------------------------------------------

def chunks_across_devices():
    """The loss in chunks cut across the devices' rows: all work on every chunk."""
    def loss(params, batch):
        chunks = jax.tree.map(lambda rows: rows.reshape(CHUNKS, -1, D), batch)
        error = jax.checkpoint(lambda chunk: squared_error(params, chunk))
        return jax.lax.map(error, chunks).mean()

    return dataclasses.replace(right.right_recomputed(), value_and_grad=jax.value_and_grad(loss))


def microbatches_across_devices():
    """reshape(M, B // M): a microbatch is the rows of one device, and all work on it."""
    def value_and_grad(params, batch):
        cut = jax.tree.map(lambda rows: rows.reshape(MICROBATCHES, -1, T, D), batch)
        return _microbatches(params, cut)

    return dataclasses.replace(_auto(shape=(8, 1)), value_and_grad=value_and_grad)


def computed_again():
    """The hidden activations under jax.checkpoint, left there from a larger model."""
    def error(params, chunk):
        hidden = jax.checkpoint(lambda w_in: jax.nn.relu(chunk["x"] @ w_in))
        y = chunk["x"] + jax.lax.psum(hidden(params["w_in"]) @ params["w_out"], "model")
        return jnp.mean((y - chunk["y"]) ** 2)

    return right.in_chunks(error)


# What is drawn ------------------------------------------------------------------------------------

def wrong_tiles():
    """The picture of a plan: rows where the devices hold columns."""
    rows = NamedSharding(mesh_of(4, 2), P("model"))
    return _auto(drawn=lambda array: jax.device_put(array, rows))
