"""Meshes without devices, for texts of programs that ran elsewhere."""
from jax.sharding import AbstractMesh, AxisType


def abstract_mesh(*shape):
    """A (batch, model) mesh of this shape."""
    return AbstractMesh(shape, ("batch", "model"), axis_types=(AxisType.Auto,) * 2)
