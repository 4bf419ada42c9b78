"""Rotary positions: scores depend on distances only, and lengths and types stay."""
import jax.numpy as jnp
import numpy as np

from meshbook.models.heads import BASE, angles, rotate

RANDOM = np.random.default_rng(0)


def test_scores_of_turned_vectors_depend_on_their_distance_only():
    q, k = RANDOM.normal(size=(2, 1, 1, 1, 64)).astype(np.float32)
    at = lambda x, place: rotate(jnp.asarray(x), angles(np.array([[place]]), 64))[0, 0, 0]
    for distance in (0, 1, 7, 100):
        scores = [float(at(q, start + distance) @ at(k, start)) for start in (0, 5, 900)]
        np.testing.assert_allclose(scores, scores[0], atol=1e-4)
    assert abs(float(at(q, 1) @ at(k, 0)) - float(at(q, 0) @ at(k, 0))) > 1e-2


def test_a_turned_vector_keeps_its_length_and_its_type():
    x = jnp.asarray(RANDOM.normal(size=(2, 5, 3, 8)), jnp.bfloat16)
    found = rotate(x, angles(np.arange(5)[None], 8))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(jnp.linalg.norm(found.astype(jnp.float32), axis=-1),
                               jnp.linalg.norm(x.astype(jnp.float32), axis=-1), rtol=2e-2)
    np.testing.assert_array_equal(found[:, 0], x[:, 0])  # position 0 turns nothing


def test_angles_are_exact_to_float32_far_into_a_row():
    positions = np.array([[0, 1, 1000, 50_000]])
    found = np.asarray(angles(positions, 12), np.float64)
    exact = positions[..., None] * BASE ** (-np.arange(0, 12, 2) / 12)
    np.testing.assert_allclose(found, exact, rtol=1e-6)
