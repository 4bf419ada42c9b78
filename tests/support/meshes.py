"""Meshes without devices, for texts of programs that ran elsewhere; a mesh of one around a test."""
import pytest
from jax.sharding import AbstractMesh, AxisType


def abstract_mesh(*shape):
    """A (batch, model) mesh of this shape."""
    return AbstractMesh(shape, ("batch", "model"), axis_types=(AxisType.Auto,) * 2)


on_one_device = pytest.mark.usefixtures("one_device")  # for tests that call a model by themselves
