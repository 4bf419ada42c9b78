"""The loss in chunks: equal to the plain one, small, nothing done twice, its head summed once."""
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from tiny_gpt import ROWS, mesh_of, place_all

from meshbook import proofs
from meshbook.hlo import module
from meshbook.models import losses
from meshbook.models.losses import MASKED, chunked_cross_entropy, cut, obvious_cross_entropy
from meshbook.sharding import Sharding, make_mesh

B, T, D, V, VOCABULARY, CHUNK = 16, 8, 32, 256, 250, 16
random = np.random.default_rng(0)
HEAD = {name: random.normal(size=shape).astype(np.float32) for name, shape in (
    ("hidden", (B, T, D)), ("w", (D, V)), ("b", (V,)))}
LABELS = random.integers(0, VOCABULARY, (B, T)).astype(np.int32)
WEIGHT = random.integers(0, 3, (B, T)).astype(np.float32)
LETTERS = {"hidden": "BTD", "w": "DV", "b": "V", "labels": "BT", "weight": "BT"}


def laid_out(rules):
    """Where the head's arrays lie: the hidden state is an activation, the others are parameters."""
    kind = {"hidden": rules.activation, "w": rules.parameter, "b": rules.parameter}
    return {name: kind[name](LETTERS[name]) for name in HEAD}


def plain(head, labels, weight=None):
    """The loss as one device would write it."""
    here = jnp.arange(len(head["b"])) < VOCABULARY
    logits = head["hidden"] @ head["w"] + jnp.where(here, head["b"], MASKED)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    right = logits.argmax(-1) == labels
    weight = jnp.ones(labels.shape) if weight is None else weight
    return (each * weight).sum() / weight.sum(), (right * weight).sum() / weight.sum()


def chunked(head, labels, weight=None, row="none", chunk=CHUNK):
    return chunked_cross_entropy(
        head["hidden"], head["w"], head["b"], labels, weight, vocabulary=VOCABULARY,
        sharding=getattr(Sharding, row)(), chunk=chunk)


def compiled(loss, row="none", shape=(1, 1), weighted=False):
    """((loss, accuracy), gradients) of placed arguments, as a program and as numbers."""
    rules = getattr(Sharding, row)()
    arguments = HEAD, LABELS, *([WEIGHT] if weighted else [])
    specs = [laid_out(rules), *[rules.activation("BT")] * (1 + weighted)]
    mesh = mesh_of(shape)
    arguments = place_all(arguments, tuple(specs), mesh)
    with jax.set_mesh(mesh):
        run = jax.jit(jax.value_and_grad(loss, has_aux=True))
        program = run.lower(*arguments).compile()
    return program, program(*arguments)


@functools.cache
def expected(weighted):
    return compiled(plain, weighted=weighted)[1]


def assert_equal(found, weighted):
    (loss, accuracy), gradients = found
    (right_loss, right_accuracy), right_gradients = expected(weighted)
    np.testing.assert_allclose(loss, right_loss, rtol=1e-5)
    np.testing.assert_allclose(accuracy, right_accuracy, rtol=1e-6)
    for name, right in right_gradients.items():
        apart = np.linalg.norm(np.asarray(gradients[name]) - np.asarray(right))
        assert apart < 1e-5 * np.linalg.norm(right), name


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("chunk", [1, CHUNK, 37, 10_000])
def test_value_and_gradients_are_the_plain_ones(chunk, weighted):
    loss = functools.partial(chunked, chunk=chunk)
    assert_equal(compiled(loss, weighted=weighted)[1], weighted)


@pytest.mark.parametrize("row", ROWS)
def test_and_so_they_are_on_a_mesh_by_every_preset(row):
    mesh = mesh_of((4, 2))
    loss = functools.partial(chunked, row=row)
    program, found = compiled(loss, row, (4, 2), weighted=True)
    assert_equal(found, True)
    times = {"none": 8, "data_parallel": 2}.get(row, 1)  # by how many devices it is not divided
    proofs.assert_divided(program, 8, 6 * B * T * D * V, times, rtol=1e-9)
    proofs.assert_communicates(program, mesh, traffic(row))


def test_the_plain_loss_that_is_compiled_for_comparison_is_the_same_loss():
    from benchmarks.aot import plain_cross_entropy

    def loss(head, labels):
        return plain_cross_entropy(head["hidden"], head["w"], head["b"], labels, None,
                                   vocabulary=VOCABULARY, sharding=Sharding.data_parallel())

    assert_equal(compiled(loss, "data_parallel", (8, 1))[1], False)


def traffic(row):
    """What moves on (4, 2): in the loop, a maximum and two sums in one per token, no gradient."""
    head, tokens = D * V + V, B // 4 * T
    batch, model = ("all-reduce", "batch"), ("all-reduce", "model")
    if row == "none":
        return {}
    if row == "data_parallel":
        return {batch: (1, 4 * (head + 3))}
    sums = 1 + 2 * tokens // CHUNK
    moved = {batch: (1, 4 * (head // 2 + 3)), model: (sums, 4 * (tokens * D + 3 * tokens))}
    if row == "fully_sharded":
        moved["all-gather", "batch"] = (1, 4 * D * V // 2)
    return moved


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize("dtype", [jnp.bfloat16])
def test_half_precision_keeps_its_types_and_a_float32_loss(dtype):
    head = jax.tree.map(lambda x: x.astype(dtype), HEAD)
    grad = jax.jit(jax.value_and_grad(chunked, has_aux=True))
    (loss, _), gradients = grad(head, LABELS)
    assert loss.dtype == jnp.float32 and {x.dtype for x in gradients.values()} == {jnp.dtype(dtype)}
    np.testing.assert_allclose(loss, expected(False)[0][0], rtol=0.02)


@pytest.mark.usefixtures("one_device")
def test_evaluation_makes_no_gradients():
    program = jax.jit(chunked).lower(HEAD, LABELS).compile()
    assert proofs.work(program) == 2 * B * T * D * V


@pytest.mark.usefixtures("one_device")
def test_a_label_that_is_no_token_is_not_a_number_unless_it_does_not_count():
    for wrong in -1, VOCABULARY, V:
        labels = np.where(np.arange(T) == 3, wrong, LABELS).astype(np.int32)
        run = jax.jit(chunked)
        assert np.isnan(run(HEAD, labels)[0])
        weight = np.broadcast_to(np.float32(np.arange(T) != 3), (B, T))
        assert np.isfinite(run(HEAD, labels, weight)[0])


def test_chunks_are_cut_evenly_and_filled_with_what_does_not_count():
    tokens = np.arange(1, 38)
    (parts,) = cut(16, tokens)
    assert parts.shape == (3, 13) and parts.ravel()[37:].tolist() == [0, 0]
    assert parts.ravel()[:37].tolist() == tokens.tolist()


def full_size(loss, shape):
    """Bytes of temporaries at batch 256, T 256, V 50,304: compiled, not run."""
    shapes = {"hidden": (256, 256, 256), "w": (256, 50_304), "b": (50_304,), "labels": (256, 256)}
    rules, head, mesh = Sharding.tensor_parallel(), {}, mesh_of(shape)
    for name, shape in shapes.items():
        kind = rules.parameter if name in ("w", "b") else rules.activation
        where = NamedSharding(mesh, kind(LETTERS[name]))
        dtype = jnp.int32 if name == "labels" else jnp.float32
        head[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=where)
    labels = head.pop("labels")

    with jax.set_mesh(mesh):
        run = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(head, labels)
    return run.compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("shape", [(1, 1), (8, 1), (4, 2)])
def test_at_full_size_temporaries_are_a_tenth_at_most(shape):
    default = functools.partial(chunked, row="tensor_parallel", chunk=losses.CHUNK)
    logits = 4 * 256 * 256 * 50_304 // math.prod(shape)
    plainly, in_chunks = full_size(split_plain, shape), full_size(default, shape)
    assert plainly > logits and in_chunks < plainly / 10 and in_chunks < logits / 5


def split_plain(head, labels):
    """The plain loss, its logits split over rows and vocabulary."""
    w_DV = jax.reshard(head["w"], P(None, "model"))
    logits = jnp.einsum("BTD,DV->BTV", head["hidden"], w_DV, out_sharding=P("batch", None, "model"))
    total = jax.nn.logsumexp(logits + head["b"], -1)
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    ids = jax.reshard(ids, jax.typeof(logits).sharding.spec)
    label = jnp.where(ids == labels[..., None], logits, 0).sum(-1)
    return (total - label).mean(), jnp.float32(0)


def test_no_array_of_all_logits_is_in_the_program():
    def largest(program):
        return max(shape.size for computation in module.parse(program).computations.values()
                   for each in computation.instructions.values()
                   for shape in jax.tree.leaves(each.shape, is_leaf=lambda x: hasattr(x, "size")))

    assert largest(compiled(plain)[0]) == B * T * V
    assert largest(compiled(chunked)[0]) == D * V > CHUNK * V  # the head is the largest


def obvious(head, labels):
    b_V = jnp.where(jnp.arange(V) < VOCABULARY, head["b"], MASKED)
    loss = obvious_cross_entropy(head["hidden"], head["w"], b_V, labels)
    return loss, jnp.float32(0)


def test_the_obvious_version_passes_three_proofs_and_fails_the_fourth():
    mesh = make_mesh((4, 2), axis_types=AxisType.Auto)
    specs, whole = laid_out(Sharding.tensor_parallel()), laid_out(Sharding.none())
    one = mesh_of((1, 1))
    program, steps = trained(obvious, mesh, specs)
    proofs.assert_sharded(steps.state, specs, mesh)
    proofs.assert_same_training(steps, trained(plain, one, whole)[1], [LABELS] * 5)
    gathered, exchanged = 2 * (D + 1) * B * T, (D + 5) * B * T
    proofs.assert_communicates(program, mesh, {
        ("all-gather", "batch"): (4, 4 * gathered),
        ("all-reduce", "model"): (5 * 16, 4 * exchanged)})  # five in each of the chunks
    useful = 6 * B * T * D * V
    with pytest.raises(proofs.ProofFailed, match=r"expected 1.333 x .*5.333 x") as failure:
        proofs.assert_divided(program, 8, useful, factor=4 / 3)
    assert failure.value.found == pytest.approx(4 * 4 / 3)

    ours = lambda head, labels: chunked(head, labels, row="tensor_parallel")
    program, steps = trained(ours, mesh_of((4, 2)), specs)
    proofs.assert_sharded(steps.state, specs, mesh_of((4, 2)))
    proofs.assert_same_training(steps, trained(plain, one, whole)[1], [LABELS] * 5)
    proofs.assert_divided(program, 8, useful, rtol=1e-9)


def trained(loss, mesh, specs):
    """Hidden and head trained by SGD: the program of a step, and the run for the proofs."""
    head = place_all(HEAD, specs, mesh)
    put = lambda labels: place_all(labels, P(*specs["hidden"][:1]), mesh)

    def step(head, labels):
        (value, _), gradients = jax.value_and_grad(loss, has_aux=True)(head, labels)
        return jax.tree.map(lambda x, g: x - 0.5 * g, head, gradients), {"loss": value}

    where = jax.tree.map(lambda x: x.sharding, head), None
    with jax.set_mesh(mesh):
        program = jax.jit(step, out_shardings=where).lower(head, put(LABELS)).compile()
    return program, proofs.Run(
        lambda head, labels: program(head, put(labels)), head, params=lambda head: head)
