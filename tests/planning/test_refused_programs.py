"""Meshes of TPUs, and what is said of a program that a compiler refuses, without a compiler."""
import time

import jax

from meshbook.planning import topologies
from meshbook.planning.topologies import tpu_mesh


def test_a_mesh_has_the_axes_batch_and_model_and_the_first_devices(monkeypatch):
    monkeypatch.setattr(topologies, "topology", lambda name: jax.devices())
    mesh = tpu_mesh("v5e-8", (2, 2))
    assert dict(mesh.shape) == {"batch": 2, "model": 2}
    assert set(mesh.devices.flat) == set(jax.devices()[:4])
    assert mesh.axis_types == (jax.sharding.AxisType.Explicit,) * 2


def test_a_program_that_is_refused_says_what_it_needs_and_how_long_that_took():
    class Lowered:
        def compile(self):
            time.sleep(0.2)
            raise jax.errors.JaxRuntimeError(
                "RESOURCE_EXHAUSTED: Ran out of memory. Used 3.50G of 2.00G hbm.")

    made = topologies._compile(Lowered(), "v5e-8", None, {"libtpu": "0"}, None, None)
    assert (made.fits, made.peak, made.available) == (False, 3.5 * 2**30, 2 * 2**30)
    assert 0.2 <= made.seconds < 60 and made.mesh == {} and made.versions == {"libtpu": "0"}
    assert made.flops is None and made.traffic is None
