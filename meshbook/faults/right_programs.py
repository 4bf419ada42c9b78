"""The right programs beside those of `wrong_programs`: what each computes, moves and holds.

A network of two layers, under Auto and by hand; clipped, frozen, accumulated, in chunks.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P
from jaxtyping import Array

from meshbook.faults.networks import (
    ADAM, CHUNKS, D, F, SPECS, T, Specimen, mesh_of, squared_error, step_traffic, weight_bytes,
)


def local_error(params: Mapping[str, Array], batch: Mapping[str, Array]):
    """The loss on one device's own rows, by hand: one partial sum over 'model'."""
    h_bTf = jax.nn.relu(batch["x"] @ params["w_in"])
    y_bTD = batch["x"] + jax.lax.psum(h_bTf @ params["w_out"], "model")
    return jnp.mean((y_bTD - batch["y"]) ** 2)


def averaged(params: Mapping[str, Array], batch: Mapping[str, Array]):
    """Loss and gradients by hand: the mean over 'batch' stands inside what is differentiated."""
    return jax.value_and_grad(lambda p: jax.lax.pmean(local_error(p, batch), "batch"))(params)


def by_hand(
    mesh: Mesh, local: Callable, check_vma: bool = True, specs: Mapping[str, P] = SPECS,
):
    """A local (params, batch) -> (loss, gradients) on every device of a mesh."""
    return jax.shard_map(local, mesh=mesh, in_specs=(specs, P("batch")), out_specs=(P(), specs),
                         check_vma=check_vma)


def right(shape: Sequence[int] = (4, 2)):
    """Column- then row-split under Auto."""
    mesh = mesh_of(*shape)
    return Specimen(mesh, jax.value_and_grad(squared_error), step_traffic(mesh))


def right_by_hand():
    """The same in shard_map."""
    mesh = mesh_of(4, 2)
    return Specimen(mesh, by_hand(mesh, averaged), step_traffic(mesh))


def right_adam():
    """The same under Adam, whose state is two moments and a count of the steps."""
    mesh = mesh_of(4, 2)
    return dataclasses.replace(right(), optimizer=ADAM, held=3 * weight_bytes(mesh) + 4)


def frozen_error(params: Mapping[str, Array], batch: Mapping[str, Array]):
    """The loss while only `w_out` is trained."""
    return squared_error({**params, "w_in": jax.lax.stop_gradient(params["w_in"])}, batch)


def right_frozen():
    """`w_in` frozen: three matmuls of five, and one gradient to sum."""
    mesh = mesh_of(4, 2)
    traffic = step_traffic(mesh) | {("all-reduce", "batch"): (1, 4 * (D * F // 2 + 1))}
    return Specimen(mesh, jax.value_and_grad(frozen_error), traffic, factor=3 / 5,
                    reference=jax.value_and_grad(frozen_error))


def with_gather(gather: Callable):
    """A frozen `w_in` divided over 'batch' too, and put together by gather(slice) at its use."""
    mesh, frozen = mesh_of(4, 2), right_frozen()
    specs = {**SPECS, "w_in": P("batch", "model")}

    def error(params, batch):
        w_in_Df = gather(jax.lax.stop_gradient(params["w_in"]))
        return jax.lax.pmean(local_error({**params, "w_in": w_in_Df}, batch), "batch")

    traffic = frozen.predicted | {("all-gather", "batch"): (1, 4 * D * F // 2)}
    return dataclasses.replace(
        frozen, value_and_grad=by_hand(mesh, jax.value_and_grad(error), specs=specs), specs=specs,
        expected=specs, held=2 * weight_bytes(mesh, rows=4), predicted=traffic)


def right_gathered():
    """A frozen weight that is fully sharded."""
    return with_gather(functools.partial(jax.lax.all_gather, axis_name="batch", tiled=True))


def clipped(whole: Callable, value_and_gradients: tuple):
    """Gradients scaled to a norm of at most 0.1; whole(squares) makes a slice's sum that of all."""
    loss, gradients = value_and_gradients
    norm = jnp.sqrt(whole(sum(jnp.sum(g * g) for g in gradients.values())))
    return loss, jax.tree.map(lambda g: g * jnp.minimum(1, 0.1 / norm), gradients)


def right_clipped():
    """Clipped by the global norm: one more number is summed over 'model'."""
    mesh = mesh_of(4, 2)

    def local(params, batch):
        return clipped(lambda squares: jax.lax.psum(squares, "model"), averaged(params, batch))

    def reference(params, batch):
        return clipped(lambda squares: squares, jax.value_and_grad(squared_error)(params, batch))

    return Specimen(mesh, by_hand(mesh, local), step_traffic(mesh, sums=2, more=4),
                    reference=reference)


def varying(params: Any):
    """Weights whose gradients stay local, to be summed over 'batch' once, after a loop."""
    return jax.tree.map(lambda w: jax.lax.pcast(w, "batch", to="varying"), params)


def accumulated(params: Mapping[str, Array], batch: Mapping[str, Array]):
    """Gradients of four microbatches of each device's own rows, summed over 'batch' once."""
    cut = jax.tree.map(lambda rows: rows.reshape(4, -1, T, D), batch)
    start = jax.tree.map(jnp.zeros_like, (varying(jnp.float32(0)), varying(params)))

    def turn(total, batch):
        more = jax.value_and_grad(local_error)(varying(params), batch)
        return jax.tree.map(jnp.add, total, more), None

    total, _ = jax.lax.scan(turn, start, cut)
    return jax.lax.pmean(jax.tree.map(lambda sums: sums / 4, total), "batch")


def right_accumulated(shape: Sequence[int] = (4, 2)):
    """Gradient accumulation with one all-reduce."""
    mesh = mesh_of(*shape)
    return Specimen(mesh, by_hand(mesh, accumulated), step_traffic(mesh, sums=4))


def right_accumulated_on_eight():
    """The same with all devices along 'batch'."""
    return right_accumulated((8, 1))


def in_chunks(error: Callable):
    """The loss in chunks of each device's own rows: only one chunk's activations are ever there."""
    def loss(params, batch):
        chunks = jax.tree.map(lambda rows: rows.reshape(CHUNKS, -1, D), batch)
        return jax.lax.map(lambda chunk: error(params, chunk), chunks).mean()

    def local(params, batch):
        value_and_gradients = jax.value_and_grad(loss)(varying(params), batch)
        return jax.lax.pmean(value_and_gradients, "batch")

    mesh = mesh_of(4, 2)
    return Specimen(mesh, by_hand(mesh, local), step_traffic(mesh, sums=CHUNKS))


def right_chunked():
    """A chunked loss that keeps what it computed."""
    return in_chunks(local_error)


def right_recomputed():
    """A chunked loss that computes each chunk again: 7/5 of the work, twice the partial sums."""
    specimen = in_chunks(jax.checkpoint(local_error))
    traffic = step_traffic(specimen.mesh, sums=2 * CHUNKS, times=2)
    return dataclasses.replace(specimen, predicted=traffic, factor=7 / 5)
