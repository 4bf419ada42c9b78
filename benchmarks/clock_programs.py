"""The programs whose times on real TPUs were published, each as a function and its arguments.

A function here gives (what to jit, its arguments as shapes). Sizes are those of the source; float32
products are of the default precision, one pass in bfloat16.
"""

from functools import partial

import jax
import jax.numpy as jnp

F32, BF16 = jnp.float32, jnp.bfloat16
array = jax.ShapeDtypeStruct


def square_matmul(n):
    """(n, n) times (n, n) in bfloat16."""
    return jnp.matmul, [array((n, n), BF16)] * 2


def matmul(m, k, n, dtype):
    """(M, K) times (K, N)."""
    return jnp.matmul, [array((m, k), dtype), array((k, n), dtype)]


def masked_matmul(n):
    """The lower triangle of a product, by a mask of integers."""
    return lambda mask, x, y: mask * (x @ y), [
        array((n, n), jnp.int32), array((n, n), BF16), array((n, n), BF16)]


def heads_out(b, t, d, h, k):
    """(B, T, D) to the heads (B, H, T, K)."""
    project = partial(jnp.einsum, "BTD,DHK->BHTK")
    return project, [array((b, t, d), BF16), array((d, h, k), BF16)]


def gemm(m, k, n):
    """2·A·B + 3·C in float32, the two factors traced."""
    return lambda a, b, A, B, C: (a * A) @ B + b * C, [
        array((), F32), array((), F32), array((m, k), F32), array((k, n), F32), array((m, n), F32)]


def syrk(n):
    """a·A·Aᵀ + b·C."""
    return lambda a, b, A, C: (a * A) @ A.T + b * C, [array((), F32)] * 2 + [array((n, n), F32)] * 2


def syr2k(n):
    """a·A·Bᵀ + a·B·Aᵀ + b·C."""
    return lambda a, b, A, B, C: (a * A) @ B.T + (a * B) @ A.T + b * C, (
        [array((), F32)] * 2 + [array((n, n), F32)] * 3)


def two_matmuls(n):
    """a·A·B·C + b·D."""
    return lambda a, b, A, B, C, D: ((a * A) @ B) @ C + b * D, (
        [array((), F32)] * 2 + [array((n, n), F32)] * 4)


def covariance(n):
    """Of n variables, each a row of n numbers (Julia's columns)."""
    def of(x_NM):
        x_NM = x_NM - x_NM.mean(1, keepdims=True)
        return x_NM @ x_NM.T / (n - 1)

    return of, [array((n, n), F32)]


def newton_schulz(n):
    """Twelve steps of the iteration that makes a matrix orthogonal."""
    def iterate(x_NN):
        a, b, c = 3.4445, -4.7750, 2.0315

        def step(_, x):
            xx = x @ x.T
            return a * x + (b * xx + c * (xx @ xx)) @ x

        return jax.lax.fori_loop(0, 12, step, x_NN / (jnp.linalg.norm(x_NN) + 1e-7))

    return iterate, [array((n, n), F32)]


def atax(n):
    """Aᵀ·(A·x)."""
    return lambda A, x: A.T @ (A @ x), [array((n, n), F32), array((n,), F32)]


def bicg(n, m):
    """Aᵀ·r and A·p."""
    return lambda A, r, p: (A.T @ r, A @ p), [
        array((n, m), F32), array((n,), F32), array((m,), F32)]


def mvt(n):
    """x + A·y and z + Aᵀ·w."""
    return lambda A, x, y, z, w: (x + A @ y, z + A.T @ w), [array((n, n), F32)] + [
        array((n,), F32)] * 4


def gesummv(n):
    """(a·A + b·B)·x."""
    return lambda a, b, A, B, x: (a * A + b * B) @ x, [array((), F32)] * 2 + [
        array((n, n), F32)] * 2 + [array((n,), F32)]


def gated_linear_unit(m, k, n, dtype):
    """silu(x·w) · (x·v), accumulated in float32."""
    def gate(x_MK, w_KJN):
        y_MJN = jnp.einsum("MK,KJN->MJN", x_MK, w_KJN,
                           precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32)
        return (jax.nn.silu(y_MJN[:, 0]) * y_MJN[:, 1]).astype(dtype)

    return gate, [array((m, k), dtype), array((k, 2, n), dtype)]


def ragged_matmul(m, k, groups, n):
    """Rows (M, K), each of one of several groups, times the group's (K, N)."""
    def multiply(x_MK, w_GKN, sizes_G):
        return jax.lax.ragged_dot(x_MK, w_GKN, sizes_G, preferred_element_type=F32).astype(BF16)

    return multiply, [array((m, k), BF16), array((groups, k, n), BF16),
                      array((groups,), jnp.int32)]


def copied(size):
    """So many bytes of bfloat16, copied."""
    return jnp.copy, [array((size // 2,), BF16)]


def jacobi_2d(n, steps):
    """Two five-point updates a step, of the inner points."""
    def update(x, y):
        inner = 0.2 * (x[1:-1, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:] + x[2:, 1:-1] + x[:-2, 1:-1])
        return y.at[1:-1, 1:-1].set(inner)

    def run(x, y):
        def step(_, pair):
            x, y = pair
            y = update(x, y)
            return update(y, x), y

        return jax.lax.fori_loop(0, steps, step, (x, y))

    return run, [array((n, n), F32)] * 2


def layer_norm(shape, axis):
    """Layer normalisation along an axis, computed in float32 from bfloat16."""
    def norm(x, scale, offset):
        x32 = x.astype(F32)
        mean = x32.mean(axis, keepdims=True)
        var = jnp.square(x32 - mean).mean(axis, keepdims=True)
        put = (-1,) + (1,) * (len(shape) - 1) if axis == 0 else (-1,)
        y = (x32 - mean) * jax.lax.rsqrt(var + 1e-6) * scale.reshape(put) + offset.reshape(put)
        return y.astype(x.dtype)

    return norm, [array(tuple(shape), BF16)] + [array((shape[axis],), F32)] * 2


def head_loss(b, d, v):
    """Mean cross-entropy of (B, D) times (D, V), all scores at once."""
    def loss(x_BD, label_B, w_DV):
        log_BV = jax.nn.log_softmax(x_BD @ w_DV)
        return -jnp.mean(jnp.sum(log_BV * jax.nn.one_hot(label_B, v), -1))

    return loss, [array((b, d), BF16), array((b,), jnp.int32), array((d, v), BF16)]


def attention(b, t, h, k, causal):
    """Attention with all its scores, softmax in float32."""
    def attend(q_BTHK, k_BTHK, v_BTHK):
        scores_BHTS = jnp.einsum("BTHK,BSHK->BHTS", q_BTHK, k_BTHK, preferred_element_type=F32)
        scores_BHTS = scores_BHTS * k**-0.5
        if causal:
            seen = jnp.tril(jnp.ones((t, t), bool))
            scores_BHTS = jnp.where(seen, scores_BHTS, jnp.finfo(F32).min)
        p_BHTS = jax.nn.softmax(scores_BHTS).astype(BF16)
        y_BTHK = jnp.einsum("BHTS,BSHK->BTHK", p_BHTS, v_BTHK, preferred_element_type=F32)
        return y_BTHK.astype(BF16)

    return attend, [array((b, t, h, k), BF16)] * 3
