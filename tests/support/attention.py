"""Causal attention on one device, written out, and one of `parallel.context` on a ring."""
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from meshbook.parallel.zigzag import zigzag_order
from meshbook.sharding import make_mesh

TOKENS = P(None, "context")


def plain(q, k, v, segments=None):
    """The sum as it is written, with all scores at once: for gradients, too."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / q.shape[-1] ** 0.5
    sees = np.tril(np.ones((q.shape[1],) * 2, bool))[None]
    if segments is not None:
        sees = sees & (segments[:, :, None] == segments[:, None])
    weights = jax.nn.softmax(jnp.where(sees[:, None], scores, -jnp.inf))
    return jnp.einsum("bhts,bshk->bthk", weights, v)


def drawn(T, H=8, G=8, K=4, B=2, documents=False, seed=0):
    """(queries, keys, values, the gradient of what they find), and documents or None."""
    random = np.random.default_rng(seed)
    arrays = [random.normal(size=(B, T, heads, K)).astype(np.float32) for heads in (H, G, G, H)]
    if not documents:
        return arrays, None
    return arrays, np.sort(random.integers(0, 4, size=(B, T)), 1).astype(np.int32)


def expected(arrays, segments):
    """What they find on one device, and the gradients of q, k and v."""
    *given, dy = arrays
    y, back = jax.vjp(lambda *x: plain(*x, segments), *given)
    return jax.device_get((y, *back(dy)))


class Ring:
    """Attention and its gradient compiled for a ring of n devices, in the order of tokens there."""

    def __init__(self, method, ways, arrays, segments=None, zigzagged=False, **how):
        how |= {"zigzagged": True} if zigzagged else {}
        T = arrays[0].shape[1]
        self.mesh = make_mesh((ways,), ("context",))
        self.order = zigzag_order(T, ways) if zigzagged else np.arange(T)

        def local(*given):
            *given, dy, segments = given
            run = lambda *x: method(*x, segments=segments, **how)
            y, back = jax.vjp(run, *given)
            return y, *back(dy)

        specs = (TOKENS,) * 4
        with jax.set_mesh(self.mesh), jax.default_matmul_precision("highest"):
            self.given = *(jax.device_put(x[:, self.order], TOKENS) for x in arrays), (
                None if segments is None else jax.device_put(segments[:, self.order], P()))
            run = jax.shard_map(local, in_specs=(*specs, P()), out_specs=specs)
            self.lowered = jax.jit(run).lower(*self.given)
            self.program = self.lowered.compile()

    def found(self):
        """What queries find and the gradients of q, k and v, in a row's own order."""
        back = np.argsort(self.order)
        return [np.asarray(x)[:, back] for x in self.program(*self.given)]


def apart(found, right):
    """The largest difference of two lists of arrays, each as a share of its norm."""
    return max(np.linalg.norm(np.float64(a) - b) / np.linalg.norm(b)
               for a, b in zip(found, right, strict=True))
