"""A small network trained on eight devices, and what a right run of it must show.

Two layers with a residual: y = x + relu(x·w_in)·w_out, squared error, SGD with momentum or Adam.
`w_in` is split by columns over 'model', `w_out` by rows, the batch over 'batch'. Every specimen is
a real program: it is compiled, and it trains. meshbook.faults.right_programs and
meshbook.faults.wrong_programs have them.
Letters: B batch, T tokens, D embed, F hidden.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array

from meshbook import proofs
from meshbook.drawing.arrays import assert_tiles, draw_sharding

B, T, D, F = 32, 16, 32, 64
CHUNKS, MICROBATCHES, RATE = 16, 8, 0.05
SPECS = {"w_in": P(None, "model"), "w_out": P("model")}
USEFUL = 5 * 2 * B * T * D * F  # two matmuls forward, three backward: x needs no gradient
PROOFS = ("sharded", "same", "communicates", "divided", "donated", "drawn")
SGD, ADAM = optax.sgd(RATE, momentum=0.9), optax.adam(0.01)


@dataclasses.dataclass(frozen=True)
class Specimen:
    """A program on a mesh, what it starts from, and what a right one would be.

    value_and_grad(params, batch) -> (loss, gradients). `specs`, `moments` and `rows` say how the
    weights, their moments and the batch are really placed, `start` what the weights are, `order`
    which batch a step gets, `feed` what becomes of it on the devices, `donate` which arguments a
    step may reuse. What the right program would show: `expected` specs of the weights, `held` bytes
    of the state per device, `predicted` traffic, `factor` of the useful work, and `reference`, what
    one device would compute.
    """

    mesh: Mesh
    value_and_grad: Callable
    predicted: dict
    factor: float = 1.0
    optimizer: optax.GradientTransformation = SGD
    specs: dict = dataclasses.field(default_factory=lambda: SPECS)
    expected: dict = dataclasses.field(default_factory=lambda: SPECS)
    held: int | None = None
    moments: dict | None = None
    rows: P = P("batch")
    start: Callable | None = None
    order: Callable = lambda number: number
    feed: Callable = lambda batch: batch
    donate: tuple = (0,)
    lie_on: Mesh | None = None
    drawn: Callable = lambda array: array
    reference: Callable = lambda params, batch: jax.value_and_grad(squared_error)(params, batch)

    def sharding(self, spec: P):
        """A spec on the mesh that the arrays really lie on."""
        return NamedSharding(self.lie_on or self.mesh, spec)

    def places(self):
        """Where the state is put."""
        whole, moments = initial_state(self.optimizer), self.moments or self.specs
        places = {"params": by_name(whole["params"], self.specs),
                  "moments": by_name(whole["moments"], moments)}
        return jax.tree.map(self.sharding, places)

    def state(self):
        """The state at the start, on the devices."""
        whole = initial_state(self.optimizer)
        weights = self.start(self.mesh) if self.start else whole["params"]
        return jax.device_put({**whole, "params": weights}, self.places())

    def loaded(self, number: int):
        """The batch of a step, on the host."""
        return data(self.order(number))

    def batch(self, number: int):
        """The same on the devices."""
        return jax.device_put(self.loaded(number), self.sharding(self.rows))

    def step(self, state: dict, number: int):
        """(new state, metrics) of one step of the compiled program."""
        return self.compiled(state, self.feed(self.batch(number)))

    def state_bytes(self):
        """Bytes of the state per device: by formula, weights and one moment, if nothing else."""
        return self.held or 2 * weight_bytes(self.mesh)

    @functools.cached_property
    def compiled(self):
        """The step, compiled for these devices; it donates the state."""
        step = jax.jit(training_step(self.value_and_grad, self.optimizer),
                       donate_argnums=self.donate, out_shardings=(self.places(), None))
        return step.lower(self.state(), self.batch(0)).compile()

    def checks(self):
        """The four proofs, and the checks of memory and of a drawing: {name: what to call}."""
        found = (
            self.assert_sharded, self.assert_same_training,
            lambda: proofs.assert_communicates(self.compiled, self.mesh, self.predicted),
            lambda: proofs.assert_divided(self.compiled, self.mesh.size, USEFUL, self.factor),
            lambda: proofs.assert_donated(self.compiled, self.state_bytes()), self.assert_drawn)
        return dict(zip(PROOFS, found, strict=True))

    def assert_sharded(self):
        """State and batch at the start, by specs, formula and data; the state after a step."""
        start, batch, held = self.state(), self.batch(0), self.state_bytes()
        specs, whole = by_name(start, self.expected), initial_state(self.optimizer)
        proofs.assert_sharded(start, specs, self.mesh, held, whole)
        proofs.assert_sharded(batch, P("batch"), self.mesh, batch_bytes(self.mesh), self.loaded(0))
        state, _ = self.step(start, 0)
        proofs.assert_sharded(state, specs, self.mesh, held)

    def assert_same_training(self):
        """Beside one device, for 20 steps."""
        alone = on_one_device(self.reference, self.optimizer)
        proofs.assert_same_training(self.run(), alone.run(), range(20))

    def assert_drawn(self):
        """The drawing of a weight shows the shards that the devices hold."""
        w_in_DF = self.state()["params"]["w_in"]
        drawing = draw_sharding(self.drawn(w_in_DF))
        try:
            assert_tiles(drawing, w_in_DF)
        except AssertionError as failure:
            raise proofs.ProofFailed(str(failure), leaf="w_in") from failure

    def run(self):
        """This training as a proofs.Run; its gradients are what the first moments begin with."""
        # After one step from zero, Adam's mu is (1 - b1) times the gradient, SGD's trace all of it.
        moment, share = ("mu", 0.1) if self.optimizer is ADAM else ("trace", 1.0)

        def gradients(state, number):
            moments = optax.tree_utils.tree_get(self.step(state, number)[0]["moments"], moment)
            return jax.tree.map(lambda m: m / share, moments)

        params = None if self.optimizer is ADAM else lambda state: state["params"]
        return proofs.Run(self.step, self.state(), gradients, params)


@functools.cache
def on_one_device(value_and_grad: Callable, optimizer: optax.GradientTransformation):
    """The reference: the same network on one device."""
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("batch", "model"))
    return Specimen(mesh, value_and_grad, {}, optimizer=optimizer)



def training_step(value_and_grad: Callable, optimizer: optax.GradientTransformation):
    """A step of any optimizer of optax."""
    def step(state, batch):
        loss, gradients = value_and_grad(state["params"], batch)
        updates, moments = optimizer.update(gradients, state["moments"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "moments": moments}, {"loss": loss}

    return step


def by_name(tree: Any, specs: Mapping[str, P]):
    """The spec of every leaf by the name at the end of its path; other leaves are replicated."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: specs.get(getattr(path[-1], "key", None), P()), tree)


def initial_state(optimizer: optax.GradientTransformation):
    """The state that every specimen starts from, on the host."""
    state = {"params": initial_weights(), "moments": optimizer.init(initial_weights())}
    return jax.tree.map(np.asarray, state)


@functools.cache
def mesh_of(*shape: int):
    """An Auto mesh of eight devices over ("batch", "model")."""
    return jax.make_mesh(shape, ("batch", "model"), axis_types=(AxisType.Auto,) * 2)


@functools.cache
def initial_weights():
    """The weights that every specimen starts from."""
    draw = np.random.default_rng(0).normal
    return {"w_in": (draw(size=(D, F)) / D**0.5).astype(np.float32),
            "w_out": (draw(size=(F, D)) / F**0.5).astype(np.float32)}


@functools.cache
def data(number: int):
    """Inputs and targets of one step, the same for every specimen."""
    x_BTD = np.random.default_rng(number).normal(size=(B, T, D)).astype(np.float32)
    return {"x": x_BTD, "y": np.tanh(2 * np.roll(x_BTD, 1, -1))}


def weight_bytes(mesh: Mesh, rows: int = 1):
    """Bytes of both weights per device; `rows` devices along 'batch' divide `w_in` once more."""
    return 4 * D * F * (rows + 1) // (rows * mesh.shape["model"])


def batch_bytes(mesh: Mesh):
    """Bytes of inputs and targets per device."""
    return 2 * 4 * B * T * D // mesh.shape["batch"]


def step_traffic(mesh: Mesh, sums: int = 1, times: int = 1, more: int = 0):
    """The traffic: y's partial sums along 'model', gradients and loss along 'batch' in one.

    sums: how many all-reduces add up y; times: how often all of it is summed; more: other bytes.
    """
    batch, model = mesh.shape.values()
    size = times * 4 * (B // batch) * T * D + more
    along_model = {("all-reduce", "model"): (sums, size)} if model > 1 else {}
    return along_model | {("all-reduce", "batch"): (1, 4 * (2 * D * F // model + 1))}


def squared_error(params: Mapping[str, Array], batch: Mapping[str, Array]):
    """The loss as one device would write it; under Auto the compiler finds the collectives."""
    h_BTF = jax.nn.relu(batch["x"] @ params["w_in"])
    y_BTD = batch["x"] + h_BTF @ params["w_out"]
    return jnp.mean((y_BTD - batch["y"]) ** 2)
