"""A small network trained on eight devices, rightly and what a right run of it must show.

Two layers with a residual: y = x + relu(x·w_in)·w_out, squared error, SGD with momentum. `w_in`
is split by columns over 'model', `w_out` by rows, the batch over 'batch'. Every specimen is a real
program: it is compiled, and it trains. meshbook.faults has the wrong ones.
Letters: B batch, T tokens, D embed, F hidden.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

B, T, D, F = 32, 16, 32, 64
CHUNKS, MICROBATCHES, RATE = 16, 8, 0.05
SPECS = {"w_in": P(None, "model"), "w_out": P("model")}
USEFUL = 5 * 2 * B * T * D * F  # two products forward, three backward: x needs no gradient


@dataclasses.dataclass(frozen=True)
class Specimen:
    """A program on a mesh, what it starts from, and what a right one would be.

    value_and_grad(params, batch) -> (loss, gradients); `specs`, `moments` and `rows` say how the
    weights, their moments and the batch are really placed. `predicted` bytes by axis, `factor` of
    the useful work and `reference`, what one device would compute, are those of the right program,
    and so is the sharding SPECS.
    """

    mesh: Mesh
    value_and_grad: Callable
    predicted: dict
    factor: float = 1.0
    specs: dict = dataclasses.field(default_factory=lambda: SPECS)
    moments: dict | None = None
    rows: P = P("batch")
    start: Callable | None = None
    order: Callable = lambda number: number
    lie_on: Mesh | None = None
    drawn: Callable = lambda array: array
    reference: Callable = lambda params, batch: jax.value_and_grad(squared_error)(params, batch)

    def sharding(self, spec):
        """A spec on the mesh that the arrays really lie on."""
        return NamedSharding(self.lie_on or self.mesh, spec)

    def places(self):
        """Where the state is put."""
        return {"params": jax.tree.map(self.sharding, self.specs),
                "moments": jax.tree.map(self.sharding, self.moments or self.specs)}

    def state(self):
        """The state at the start, on the devices."""
        weights = self.start(self.mesh) if self.start else initial_weights()
        zeros = jax.tree.map(np.zeros_like, initial_weights())
        return jax.device_put({"params": weights, "moments": zeros}, self.places())

    def batch(self, number):
        """The batch of a step, on the devices."""
        return jax.device_put(data(self.order(number)), self.sharding(self.rows))

    @functools.cached_property
    def compiled(self):
        """The step, compiled for these devices; it donates the state."""
        step = jax.jit(sgd(self.value_and_grad), donate_argnums=0,
                       out_shardings=(self.places(), None))
        return step.lower(self.state(), self.batch(0)).compile()


def sgd(value_and_grad):
    """A training step: momentum 0.9, so that after the first step the moments are the gradients."""
    def step(state, batch):
        loss, gradients = value_and_grad(state["params"], batch)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["moments"], gradients)
        params = jax.tree.map(lambda p, m: p - RATE * m, state["params"], moments)
        return {"params": params, "moments": moments}, {"loss": loss}

    return step


@functools.cache
def mesh_of(*shape):
    """An Auto mesh of eight devices over ("batch", "model")."""
    return jax.make_mesh(shape, ("batch", "model"), axis_types=(AxisType.Auto,) * 2)


@functools.cache
def initial_weights():
    """The weights that every specimen starts from."""
    draw = np.random.default_rng(0).normal
    return {"w_in": (draw(size=(D, F)) / D**0.5).astype(np.float32),
            "w_out": (draw(size=(F, D)) / F**0.5).astype(np.float32)}


@functools.cache
def data(number):
    """Inputs and targets of one step, the same for every specimen."""
    x_BTD = np.random.default_rng(number).normal(size=(B, T, D)).astype(np.float32)
    return {"x": x_BTD, "y": np.tanh(2 * np.roll(x_BTD, 1, -1))}


def bytes_of(mesh, activations=1):
    """The prediction: the partial sums of y along 'model', local gradients and loss on 'batch'."""
    batch, model = mesh.shape.values()
    along_model = {"model": activations * 4 * (B // batch) * T * D} if model > 1 else {}
    return along_model | {"batch": 4 * (2 * D * F // model + 1)}


# The right programs -------------------------------------------------------------------------------

def squared_error(params, batch):
    """The loss as one device would write it; under Auto the compiler finds the collectives."""
    h_BTF = jax.nn.relu(batch["x"] @ params["w_in"])
    y_BTD = batch["x"] + h_BTF @ params["w_out"]
    return jnp.mean((y_BTD - batch["y"]) ** 2)


def local_error(params, batch):
    """The loss on one device's own rows, by hand: one partial sum over 'model'."""
    h_bTf = jax.nn.relu(batch["x"] @ params["w_in"])
    y_bTD = batch["x"] + jax.lax.psum(h_bTf @ params["w_out"], "model")
    return jnp.mean((y_bTD - batch["y"]) ** 2)


def averaged(params, batch):
    """Loss and gradients by hand: the mean over 'batch' stands inside what is differentiated."""
    return jax.value_and_grad(lambda p: jax.lax.pmean(local_error(p, batch), "batch"))(params)


def by_hand(mesh, local, check_vma=True):
    """A local (params, batch) -> (loss, gradients) on every device of a mesh."""
    return jax.shard_map(local, mesh=mesh, in_specs=(SPECS, P("batch")), out_specs=(P(), SPECS),
                         check_vma=check_vma)


def right(shape=(4, 2)):
    """Column- then row-split under Auto."""
    mesh = mesh_of(*shape)
    return Specimen(mesh, jax.value_and_grad(squared_error), bytes_of(mesh))


def right_by_hand():
    """The same in shard_map."""
    mesh = mesh_of(4, 2)
    return Specimen(mesh, by_hand(mesh, averaged), bytes_of(mesh))


def frozen_error(params, batch):
    """The loss while only `w_out` is trained."""
    return squared_error({**params, "w_in": jax.lax.stop_gradient(params["w_in"])}, batch)


def right_frozen():
    """`w_in` frozen: three products of five, and one gradient to sum."""
    mesh = mesh_of(4, 2)
    predicted = bytes_of(mesh) | {"batch": 4 * (D * F // 2 + 1)}
    return Specimen(mesh, jax.value_and_grad(frozen_error), predicted, factor=3 / 5,
                    reference=jax.value_and_grad(frozen_error))


def clipped(whole, value_and_gradients):
    """Gradients scaled to a norm of at most 0.1; whole(squares) makes a slice's sum that of all."""
    loss, gradients = value_and_gradients
    norm = jnp.sqrt(whole(sum(jnp.sum(g * g) for g in gradients.values())))
    return loss, jax.tree.map(lambda g: g * jnp.minimum(1, 0.1 / norm), gradients)


def right_clipped():
    """Clipped by the global norm: one more number is summed over 'model'."""
    mesh = mesh_of(4, 2)
    predicted = bytes_of(mesh) | {"model": bytes_of(mesh)["model"] + 4}

    def local(params, batch):
        return clipped(lambda squares: jax.lax.psum(squares, "model"), averaged(params, batch))

    def reference(params, batch):
        return clipped(lambda squares: squares, jax.value_and_grad(squared_error)(params, batch))

    return Specimen(mesh, by_hand(mesh, local), predicted, reference=reference)


def varying(params):
    """Weights whose gradients stay local, to be summed over 'batch' once, after a loop."""
    return jax.tree.map(lambda w: jax.lax.pcast(w, "batch", to="varying"), params)


def accumulated(params, batch):
    """Gradients of four microbatches of each device's own rows, summed over 'batch' once."""
    cut = jax.tree.map(lambda rows: rows.reshape(4, -1, T, D), batch)
    start = jax.tree.map(jnp.zeros_like, (varying(jnp.float32(0)), varying(params)))

    def turn(total, batch):
        more = jax.value_and_grad(local_error)(varying(params), batch)
        return jax.tree.map(jnp.add, total, more), None

    total, _ = jax.lax.scan(turn, start, cut)
    return jax.lax.pmean(jax.tree.map(lambda sums: sums / 4, total), "batch")


def right_accumulated(shape=(4, 2)):
    """Gradient accumulation with one all-reduce."""
    mesh = mesh_of(*shape)
    return Specimen(mesh, by_hand(mesh, accumulated), bytes_of(mesh))


def right_accumulated_on_eight():
    """The same with all devices along 'batch'."""
    return right_accumulated((8, 1))


def in_chunks(error):
    """The loss in chunks of each device's own rows: only one chunk's activations are ever there."""
    def loss(params, batch):
        chunks = jax.tree.map(lambda rows: rows.reshape(CHUNKS, -1, D), batch)
        return jax.lax.map(lambda chunk: error(params, chunk), chunks).mean()

    def local(params, batch):
        value_and_gradients = jax.value_and_grad(loss)(varying(params), batch)
        return jax.lax.pmean(value_and_gradients, "batch")

    mesh = mesh_of(4, 2)
    return Specimen(mesh, by_hand(mesh, local), bytes_of(mesh))


def right_chunked():
    """A chunked loss that keeps what it computed."""
    return in_chunks(local_error)


def right_recomputed():
    """A chunked loss that computes each chunk again: 7/5 of the work, twice the partial sums."""
    specimen = in_chunks(jax.checkpoint(local_error))
    predicted = bytes_of(specimen.mesh, activations=2)
    return dataclasses.replace(specimen, predicted=predicted, factor=7 / 5)
