"""Two layers of experts as a function of its arrays, on any mesh, and the same by dense experts."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
from dense_experts import layer

from meshbook.parallel.experts import dropless, expert_parallel
from meshbook.parallel.routing import balance_loss, capacity, loads, route, slots_of
from meshbook.parallel.sequence import products
from meshbook.sharding import Sharding, make_mesh

L, B, T, D, F, E, A, S, BLOCK = 2, 8, 12, 10, 14, 8, 2, 2, 4
C = capacity(1.0, T, A, E)
RANDOM = np.random.default_rng(0)
normal = lambda *shape: RANDOM.normal(size=shape).astype(np.float32)
X = normal(B, T, D)
PARAMS = {
    "DN": normal(L, D, E) / 3, "DF": normal(L, D, F) / 3, "FD": normal(L, F, D) / 3,
    "EDSF": normal(L, E, D, S, F) / 3, "ESF": normal(L, E, S, F) / 3,
    "EFD": normal(L, E, F, D) / 3, "ED": normal(L, E, D) / 3}
MESHES = {"one": ((1, 1), ("batch", "model")), "(8)": ((8,), ("expert",)),
          "(4, 2)": ((4, 2), ("batch", "expert")),
          "(2, 2, 2)": ((2, 2, 2), ("batch", "expert", "model"))}
WAYS = {"capacity": C, "dropless": None}


def rules_on(mesh):
    """Rules whose axes the mesh has."""
    have = lambda *axes: tuple(axis for axis in axes if axis in mesh.axis_names) or None
    return Sharding.none().also(B=have("batch", "expert"), E=have("expert"), F=have("model"),
                                L=None, N=None)


def experts_of(rules, params, x, slots):
    """One layer of experts: (its result, balance loss, loads before and after dropping)."""
    weights = {name: w for name, w in params.items() if name.startswith("E")}
    router = rules.gather("DN", params["DN"], x.dtype)
    routing = route(jnp.einsum("BTD,DE->BTE", x, router), A)
    gates, before = routing.gates_BTA, loads(routing.experts_BTA, E)
    if slots is None:
        y = dropless(rules, x, routing.experts_BTA, gates, weights, BLOCK)
        return y, balance_loss(routing), before, before
    slots_BTA = slots_of(routing.experts_BTA, E, slots)
    y = expert_parallel(rules, x, slots_BTA, gates, weights, slots)
    return y, balance_loss(routing), before, loads(slots_BTA // slots, E)


def hidden(rules, params, x, slots, again=False):
    """Layers of experts with one shared expert, in a scan."""
    def turn(x, params):
        shared = [rules.gather(name, params[name], x.dtype) for name in ("DF", "FD")]
        (h,) = products(x, shared[:1], [rules.activation("BTF")])
        (h,) = products(jnp.sin(h), shared[1:], [rules.activation("BTD")])
        y, *others = experts_of(rules, params, x, slots)
        return x + h + y, others

    return jax.lax.scan(jax.checkpoint(turn, prevent_cse=False) if again else turn, x, params)


def loss_of(y, balance):
    """A number on which every element of the result has its own influence."""
    return (y * (jnp.cos(jnp.arange(D)) + y)).mean() + 0.1 * balance.sum()


def loss(rules, slots, params, x, again=False):
    y, (balance, before, after) = hidden(rules, params, x, slots, again)
    return loss_of(y, balance), (y, balance, before, after)


def placed(mesh, rules):
    """Parameters and tokens where the rules have them."""
    put = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))
    params = {name: put(w, rules.parameter("L" + name)) for name, w in PARAMS.items()}
    return params, put(X, rules.activation("BTD"))


@functools.cache
def program(name, way):
    """(mesh, compiled loss and gradients, their results)."""
    mesh = make_mesh(*MESHES[name])
    rules = rules_on(mesh)
    step = jax.value_and_grad(functools.partial(loss, rules, WAYS[way]), (0, 1), has_aux=True)
    with jax.set_mesh(mesh):
        arguments = placed(mesh, rules)
        compiled = jax.jit(step).lower(*arguments).compile()
        return mesh, compiled, jax.device_get(compiled(*arguments))


@functools.cache
def reference(way):
    """The same by experts that all compute every token."""
    def plain(params, x):
        found = []
        for number in range(L):
            own = {name: w[number] for name, w in params.items()}
            y, *others = layer(own, own["DN"], x, A, WAYS[way])
            x = x + jnp.sin(x @ own["DF"]) @ own["FD"] + y
            found.append(others)
        return loss_of(x, found[0][0] + found[1][0]), (x, *map(jnp.stack, zip(*found, strict=True)))

    return jax.device_get(jax.jit(jax.value_and_grad(plain, (0, 1), has_aux=True))(PARAMS, X))


def assert_close(found, expected, rtol=1e-6):
    """Every leaf, apart by at most this share of its own norm."""
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(found),
                                  jax.tree.leaves(expected), strict=True):
        apart, norm = np.linalg.norm(np.asarray(one) - other), np.linalg.norm(other)
        assert norm > 0 and apart <= rtol * norm, (jax.tree_util.keystr(path), apart / norm)
