"""A model that this book does not have: a table of its own is all that its costs need."""
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from meshbook import proofs
from meshbook.costs import tables
from meshbook.costs.memory import step_memory
from meshbook.costs.plans import Plan
from meshbook.costs.rows import Kept, Row, Table
from meshbook.costs.step import describe
from meshbook.costs.traffic import step_traffic
from meshbook.costs.work import step_work
from meshbook.hlo.flops import work
from meshbook.sharding import make_mesh


@dataclass(frozen=True)
class MLPConfig:
    """Residual MLPs over vectors."""

    inputs: int = 24
    width: int = 16
    hidden: int = 32
    classes: int = 8
    layers: int = 3


MLP = Table(
    dims=dict(I="inputs", D="width", F="hidden", C="classes", T="1", W="1"),
    first=(Row("I>D", "w_in_ID", tokens="B", gradients=1),),
    layer=(Row("D>F", "w_up_DF", tokens="B", again="all", reads="MLP"),
           Row("F>D", "w_down_FD", tokens="B", again="")),
    last=(Row("D>C", "w_out_DC", tokens="B", reads="head"),),
    inputs=(Kept("BI", bytes=4),), kept={"none": (Kept("BD", bytes=4), Kept("BF", 2, bytes=4))})


@pytest.fixture(autouse=True)
def table(monkeypatch):
    monkeypatch.setitem(tables.TABLES, MLPConfig, MLP)


def program(config, mesh, rows):
    """A step of gradient descent by plain JAX: rows split over "batch", hidden units over "model"."""
    key = jax.random.split(jax.random.key(0), 3)
    draw = lambda n, *shape: jax.random.normal(key[n], shape)
    I, D, F, C = config.inputs, config.width, config.hidden, config.classes
    at = lambda *axes: NamedSharding(mesh, P(*axes))
    params = {"in": jax.device_put(draw(0, I, D), at()), "out": jax.device_put(draw(1, D, C), at()),
              "layers": [(jax.device_put(draw(2, D, F), at(None, "model")),
                          jax.device_put(draw(2, F, D), at("model"))) for _ in range(config.layers)]}
    x_BI = jax.device_put(jnp.ones((rows, I)), at("batch"))
    y_BC = jax.device_put(jnp.ones((rows, C)), at("batch"))

    def loss(params, x_BI, y_BC):
        h_BD = x_BI @ params["in"]
        for w_DF, w_FD in params["layers"]:
            h_BD += jax.nn.relu(h_BD @ w_DF) @ w_FD
        return ((h_BD @ params["out"] - y_BC) ** 2).sum()

    def step(params, x_BI, y_BC):
        return jax.tree.map(lambda p, d: p - 0.1 * d, params, jax.grad(loss)(params, x_BI, y_BC))

    return params, jax.jit(step).lower(params, x_BI, y_BC).compile()


@pytest.mark.parametrize("plan", [
    Plan(8, rules="data_parallel"), Plan(2, model=4, rules="tensor_parallel"),
    Plan(4, model=2, rules="tensor_parallel")], ids=lambda plan: plan.name)
def test_parameters_work_and_bytes_are_those_of_its_program(plan):
    config, rows = MLPConfig(), 16
    mesh = make_mesh((plan.batch, plan.model), axis_types=AxisType.Auto)
    params, compiled = program(config, mesh, rows)
    step = describe(config, plan, rows)
    held = sum(leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(params))
    assert step.numbers["stored"] == held
    assert work(compiled) == step_work(step).done
    found, said = proofs.collectives(compiled, mesh), step_traffic(step)
    scalars = 2 * 4  # of loss and accuracy, which this step does not return
    for axes in [("batch",)] + [("model",)] * (plan.model > 1):
        kind = "all-reduce", axes
        assert found[kind].bytes == said[kind].bytes - scalars * (axes == ("batch",))


def test_its_sizes_are_the_names_of_its_config():
    assert tables.sizes_of(MLPConfig()) == {"I": 24, "D": 16, "F": 32, "C": 8, "T": 1, "W": 1}
    one, two = (describe(replace(MLPConfig(), layers=n), Plan(2), 8) for n in (1, 2))
    assert two.numbers["used"] - one.numbers["used"] == 2 * 16 * 32
    assert np.isclose(step_memory(two, tiles=False).activations,
                      2 * step_memory(one, tiles=False).activations)


def test_a_config_without_a_table_is_refused(monkeypatch):
    monkeypatch.delitem(tables.TABLES, MLPConfig)
    with pytest.raises(TypeError, match="expected a config of ViTConfig, .*; found MLPConfig"):
        describe(MLPConfig(), Plan(2), 8)
