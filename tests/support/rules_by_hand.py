"""Functions with a gradient that is written by hand, and plain code for the same: CASES."""
import functools
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from attention import plain as plain_attention
from dense_experts import one_mlp
from jax.sharding import PartitionSpec as P

from meshbook.models.context_attention import attend_over_context
from meshbook.models.fused_loss import one_pass_cross_entropy
from meshbook.models.losses import chunked_cross_entropy
from meshbook.models.row_attention import attend_by_rows
from meshbook.models.text_models import look_up
from meshbook.parallel.accumulation import in_microbatches
from meshbook.parallel.context import Context, gather_kv, ring_attention, ulysses
from meshbook.parallel.experts import dropless, expert_parallel
from meshbook.parallel.grouped import grouped_matmul
from meshbook.parallel.overlap import all_gather_matmul, matmul_reduce_scatter
from meshbook.parallel.routing import slots_of
from meshbook.parallel.zigzag import zigzag_order
from meshbook.sharding import Sharding, WithOwn, opened, reduced

RANDOM = np.random.default_rng(0)


def normal(*shape):
    return RANDOM.normal(size=shape).astype(np.float32)


@dataclass(frozen=True)
class Case:
    """A function of the package with a rule by hand, and plain code for the same.

    rule: where it stands; mesh: shape and names; specs: of the arguments; both functions have the
    same arguments, arrays or trees of them.
    """

    rule: str
    function: object
    plain: object
    given: tuple
    specs: tuple = ()
    mesh: tuple = field(default=((1, 1), ("batch", "model")))


def per_device(function, specs, out):
    return jax.shard_map(function, in_specs=specs, out_specs=out)


def of_overlap():
    mesh = (3,), ("model",)
    tokens, hidden, columns = P(None, "model"), P(None, None, "model"), P(None, "model")
    gathered = lambda **how: lambda *given: per_device(
        lambda x, w, v: all_gather_matmul(x, [w, v], "model", **how),
        (tokens, columns, columns), [hidden, hidden])(*given)
    scattered = lambda **how: lambda *given: per_device(
        lambda h, w: matmul_reduce_scatter(h, w, "model", **how),
        (hidden, P("model")), tokens)(*given)
    x_BTD, w_DF, v_DF, h_BTF = normal(2, 6, 4), normal(4, 3), normal(4, 6), normal(2, 6, 6)
    for name, how in ("ring", {}), ("both ways", {"bidirectional": True}):
        yield name, Case("parallel.overlap.gathering", gathered(**how),
                         lambda x, w, v: [x @ w, x @ v], (x_BTD, w_DF, v_DF),
                         (tokens, columns, columns), mesh)
        yield name, Case("parallel.overlap.scattering", scattered(**how), lambda h, w: h @ w,
                         (h_BTF, normal(6, 4)), (hidden, P("model")), mesh)


def of_context():
    mesh, tokens = ((3,), ("context",)), P(None, "context")
    given = normal(2, 12, 6, 3), normal(2, 12, 3, 3), normal(2, 12, 3, 5)
    segments = np.array([[0] * 4 + [1] + [2] * 7, [0] * 5 + [3] * 7], np.int32)
    order = zigzag_order(12, 3)
    for name, method, how in (("ring", ring_attention, {"block": 3}), ("gather", gather_kv, {}),
                              ("zigzag", ring_attention, {"zigzagged": True, "block": 2}),
                              ("ulysses", ulysses, {"block": 5})):
        at = order if "zigzagged" in how else np.arange(12)
        function = lambda *given, method=method, how=how, at=at: per_device(
            lambda *given: method(*given[:3], segments=given[3], **how), (tokens,) * 3 + (P(),),
            tokens)(*given, jnp.asarray(segments[:, at]))
        plain = lambda *given, at=at: plain_attention(
            *(x[:, np.argsort(at)] for x in given), segments)[:, at]
        yield name, Case("parallel.context.attend", function, plain, given, (tokens,) * 3, mesh)

    rules = Sharding.context_parallel(Context("gather", block=3)).also(G=None)
    yield "", Case("models.context_attention._over_context",
                   lambda *given: attend_over_context(
                       rules, *given, jax.reshard(jnp.asarray(segments), P("batch"))),
                   lambda *given: plain_attention(*given, segments), given,
                   (P("batch", "context"),) * 3, ((2, 3), ("batch", "context")))


def of_rows():
    rules = Sharding.tensor_parallel().also(G="model", P=None)
    B, T, H, G, K, R = 2, 5, 4, 2, 3, 2
    sees = RANDOM.random((B, T, T)) < 0.6
    sees[..., 0] = True
    given = normal(B, T, H, K), normal(B, T, H, R), normal(B, T, G, K), normal(B, T, R), normal(
        B, T, G, 3)

    def plain(q, turned_q, k, turned_k, v):
        k, v = (jnp.repeat(x, H // G, 2) for x in (k, v))
        scores = jnp.einsum("bthk,bshk->bhts", q, k) + jnp.einsum(
            "bthr,bsr->bhts", turned_q, turned_k)
        scores = jnp.where(sees[:, None], scores / (K + R) ** 0.5, -jnp.inf)
        return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), v)

    heads, rows = P("batch", None, "model"), P("batch")
    for name, axes in ("summed at once", ()), ("summed later", ("model",)):
        function = lambda q, turned_q, k, turned_k, v, axes=axes: attend_by_rows(
            rules, (q, turned_q), (k, reduced(turned_k, axes)), v, jnp.asarray(sees))
        yield name, Case("models.row_attention._by_rows", function, plain, given,
                         (heads, heads, heads, rows, heads), ((1, 2), ("batch", "model")))


def of_embeddings():
    ids_BT = np.array([[3, 3, 0, 5], [3, 1, 1, 1]], np.int32)
    for name in "tensor_parallel", "sequence_parallel", "none":
        rules = getattr(Sharding, name)()
        function = lambda w, rules=rules: look_up("VD", w, ids_BT, 6, jnp.float32, rules)
        yield name, Case("models.text_models.rows_of", function, lambda w: w[ids_BT],
                         (normal(6, 3),), (rules.parameter("VD"),), ((2, 2), ("batch", "model")))


def of_losses():
    B, T, D, V, vocabulary = 4, 5, 3, 8, 7
    labels = RANDOM.integers(0, vocabulary, (B, T)).astype(np.int32)
    weight = RANDOM.uniform(0.2, 3, (B, T)).astype(np.float32)
    weight[1, 2:4], weight[0, 0] = 0, -0.5

    def plain(h, w, b):
        scores = jnp.where(jnp.arange(V) < vocabulary, h @ w + b, -jnp.inf)
        each = jax.nn.logsumexp(scores, -1) - jnp.take_along_axis(
            scores, labels[..., None], -1)[..., 0]
        right = scores.argmax(-1) == labels
        return tuple((x * weight).sum() / np.float64(weight).sum() for x in (each, right))

    rules = Sharding.tensor_parallel()
    specs = rules.activation("BTD"), rules.parameter("DV"), rules.parameter("V")
    for name, loss in ("chunks", chunked_cross_entropy), ("one pass", one_pass_cross_entropy):
        function = lambda *given, loss=loss: loss(
            *given, jnp.asarray(labels), jnp.asarray(weight), vocabulary=vocabulary,
            sharding=rules, chunk=4)
        yield name, Case("models.losses.total", function, plain,
                         (normal(B, T, D), normal(D, V), normal(V)), specs,
                         ((2, 2), ("batch", "model")))


def of_blocks():
    owner = np.array([0, 2, 2, 3, 0], np.int32)  # 3 is no expert, and expert 1 has no block

    def plain(x, w):
        return jnp.concatenate([part @ w[e] if e < 3 else jnp.zeros((2, 5))
                                for part, e in zip(jnp.split(x, 5), owner, strict=True)])

    yield "", Case("parallel.grouped.grouped_matmul",
                   lambda x, w: grouped_matmul(x, w, jnp.asarray(owner)), plain,
                   (normal(10, 4), normal(3, 4, 5)), (P(), P()))


def of_experts():
    B, T, A, E, D, F, C = 2, 5, 2, 4, 3, 4, 2
    choices = RANDOM.integers(0, E, (B, T, A)).astype(np.int32)
    kept = np.zeros((B, T, A), bool)
    for row, t, a in np.ndindex(B, T, A):
        before = choices[row].ravel()[:t * A + a]
        kept[row, t, a] = (before == choices[row, t, a]).sum() < C
    assert 0 < kept.sum() < kept.size
    weights = {"EDSF": normal(E, D, 2, F), "ESF": normal(E, 2, F), "EFD": normal(E, F, D),
               "ED": normal(E, D)}
    rules = Sharding.none().also(B="expert", E="expert", F="model")
    specs = P("expert"), P("expert"), {name: rules.activation(name) for name in weights}

    def plain(counts, x, gates, weights):
        y = 0
        for number in range(E):
            gate = jnp.where((choices == number) & counts, gates, 0).sum(-1)
            y = y + gate[..., None] * one_mlp(weights, number, x)
        return y

    with_slots = lambda x, gates, weights: expert_parallel(
        rules, x, slots_of(jnp.asarray(choices), E, C), gates, weights, C)
    without = lambda x, gates, weights: dropless(
        rules, x, jnp.asarray(choices), gates, weights, 3)
    for name, function, counts in ("slots", with_slots, kept), ("dropless", without, True):
        yield name, Case("parallel.experts.made_by_experts", function,
                         functools.partial(plain, counts),
                         (normal(B, T, D), normal(B, T, A), weights), specs,
                         ((2, 2), ("expert", "model")))


@dataclass(frozen=True)
class Bare:
    """What `in_microbatches` asks of a program."""

    rows: str = "batch"
    lives: None = None
    waits: bool = False

    def model(self, params):
        return params


def of_parts():
    x_BD, counts_B = normal(12, 4), RANDOM.uniform(-1, 3, 12).astype(np.float32)

    def each(params, x_BD):
        return jnp.sin(jnp.tanh(x_BD @ params["DF"]) @ params["F"])

    def loss(params, program, batch, key=None):
        return (batch["counts"] * each(params, batch["x"])).mean(), {}

    def in_three(params):
        given = {"x": x_BD, "counts": counts_B}
        batch = {name: jax.reshard(jnp.asarray(x), P("batch")) for name, x in given.items()}
        return in_microbatches(loss, 3)(params, Bare(), batch)[0]

    yield "", Case("parallel.accumulation.with_made_gradients", in_three,
                   lambda params: (counts_B * each(params, x_BD)).mean(),
                   ({"DF": normal(4, 6), "F": normal(6)},), ({"DF": P(), "F": P("batch")},),
                   ((2, 1), ("batch", "model")))


def of_storage():
    x_BD, w_DF = normal(4, 6), normal(6, 8)
    stored, used = P("batch", "model"), P(None, "model", reduced={"batch"})

    def product(w):
        x = jax.reshard(jnp.asarray(x_BD), P("batch"))
        return jnp.einsum("BD,DF->BF", x, opened(w, used))

    both = lambda own: product(WithOwn(jax.reshard(jnp.asarray(w_DF), P(None, "model")), own))
    for name, function in ("gathered", product), ("given whole", both):
        yield name, Case("sharding.gradients.whole_of", function, lambda w: x_BD @ w, (w_DF,),
                         (stored,), ((2, 2), ("batch", "model")))


CASES = {f"{case.rule} {name}".strip(): case for of in (
    of_overlap, of_context, of_rows, of_embeddings, of_losses, of_blocks, of_experts, of_parts,
    of_storage) for name, case in of()}
