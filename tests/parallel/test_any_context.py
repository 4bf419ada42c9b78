"""Every way of attention over split tokens, for sizes, blocks and documents that nobody chose."""
import jax
import jax.numpy as jnp
import numpy as np
from attention import Ring, expected
from hypothesis import example, given
from hypothesis import strategies as st
from properties import examples

from meshbook.parallel.context import gather_kv, ring_attention, ulysses

DEVICES = st.sampled_from([3, 2, 5, 4, 7, 6, 8, 1])
METHODS = {"ring": ring_attention, "gather": gather_kv, "ulysses": ulysses}


@st.composite
def documents(draw, rows, tokens):
    """Documents (rows, tokens) of 1 token and more, by numbers that may come again, or None.

    Half of the borders lie anywhere; the others are those of documents of a single token.
    """
    if draw(st.booleans()):
        return None
    found = []
    for _ in range(rows):
        borders = draw(st.sets(st.integers(1, tokens), max_size=4))
        borders |= {at + 1 for at in borders if draw(st.booleans())}
        numbers = draw(st.lists(st.integers(-1, 3), min_size=10, max_size=10))
        found.append([numbers[sum(at >= border for border in borders)] for at in range(tokens)])
    return np.array(found, np.int32)


@st.composite
def attentions(draw):
    """(name of a method, devices, whether tokens are zigzagged, block, sizes, documents, type)."""
    name, n = draw(st.sampled_from(sorted(METHODS))), draw(DEVICES)
    zigzagged = name != "ulysses" and draw(st.booleans())
    few = st.sampled_from([2, 3, 1])
    t = 2 * draw(few) if zigzagged else draw(st.sampled_from([5, 4, 3, 2, 6, 1]))
    groups = draw(few) * n if name == "ulysses" else draw(few)
    sizes = {"B": draw(st.sampled_from([2, 1])), "T": n * t, "G": groups, "H": groups * draw(few),
             "K": draw(few), "V": draw(few)}
    block, dtype = st.sampled_from([2, 3, 4, 1, 7]), st.sampled_from(2 * ["float32"] + ["bfloat16"])
    return name, n, zigzagged, draw(block), sizes, draw(documents(sizes["B"], n * t)), draw(dtype)


FILLED = "ulysses", 2, False, 4, dict(B=1, T=10, G=2, H=4, K=2, V=3), None, "float32"


@examples(7)
@example(FILLED, 0)
@given(attentions(), st.integers(0, 2 ** 32 - 1))
def test_what_is_found_and_all_gradients_are_those_of_one_device(drawn, seed):
    name, n, zigzagged, block, s, segments, dtype = drawn
    random = np.random.default_rng(seed)
    arrays = [np.asarray(jnp.asarray(random.normal(size=(s["B"], s["T"], *each)), dtype))
              for each in ((s["H"], s["K"]), (s["G"], s["K"]), (s["G"], s["V"]), (s["H"], s["V"]))]
    ring = Ring(METHODS[name], n, arrays, segments, zigzagged=zigzagged, block=block)
    with jax.enable_x64(True):
        right = expected([np.float64(x) for x in arrays], segments)
    near = 1e-5 if dtype == "float32" else 6e-2
    for found, wanted in zip(ring.found(), right, strict=True):
        assert found.dtype == dtype
        np.testing.assert_allclose(np.float64(found), wanted, rtol=near, atol=near)
