"""Save what each compiler makes of four layouts of one small training step, and what
v5e makes of two programs in which matmuls are hard to see.

    python tests/support/programs/make.py cpu          # eight simulated devices, jax 0.10.2
    python tests/support/programs/make.py cpu-new      # the same with jax 0.12.0.1
    python tests/support/programs/make.py v2           # jax 0.10.2 and libtpu 0.0.42.1, but no TPU
    python tests/support/programs/make.py v5e
    python tests/support/programs/make.py v3 ... tpu7x # one layout each, for the clock

Writes <platform>-<layout>.txt.gz beside this file; test_programs.py and test_flops.py derive by
hand what the texts must hold.
"""

import gzip
import os
import pathlib
import sys

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

B, T, D, F, H, K, L = 64, 64, 256, 1024, 8, 32, 3
TOPOLOGIES = {"v2": ("v2:2x2", {}), "v5e": ("v5e:2x4", {})}
OTHERS = {"v3": ("v3:2x2", {}), "v4": ("v4:2x2x2", {"chip_config_name": "megacore"}),
          "v5p": ("v5p:2x2x2", {}), "v6e": ("v6e:2x4", {}), "tpu7x": ("tpu7x:2x2x1", {})}
SHAPES = {"qkv": (D, 3, H, K), "out": (H, K, D), "up": (D, F), "down": (F, D)}
WHOLE = {name: P() for name in SHAPES}
TENSOR = {"qkv": P(None, None, "model"), "out": P("model"),
          "up": P(None, "model"), "down": P("model")}
BOTH = {"qkv": P("batch", None, "model"), "out": P("model", None, "batch"),
        "up": P("batch", "model"), "down": P("model", "batch")}
LAYOUTS = {  # mesh, table, one stacked scan or a list of blocks
    "data": ((8, 1), WHOLE, False), "tensor": ((4, 2), TENSOR, False),
    "full": ((4, 2), BOTH, False), "scan": ((4, 2), TENSOR, True),
}


def block(x_BTD, weights):
    """Attention and an MLP, each column- then row-split, without norms, biases and dropout."""
    qkv = jnp.einsum("BTD,DnHK->nBTHK", x_BTD, weights["qkv"])
    scores_BHTS = jnp.einsum("BTHK,BSHK->BHTS", qkv[0], qkv[1])
    mixed_BTHK = jnp.einsum("BHTS,BSHK->BTHK", jax.nn.softmax(scores_BHTS / K), qkv[2])
    x_BTD = x_BTD + jnp.einsum("BTHK,HKD->BTD", mixed_BTHK, weights["out"])
    h_BTF = jax.nn.relu(jnp.einsum("BTD,DF->BTF", x_BTD, weights["up"]))
    return x_BTD + jnp.einsum("BTF,FD->BTD", h_BTF, weights["down"])


def loss(params, x_BTD):
    """The mean square of what comes out."""
    x_BTD = x_BTD + params["position"]
    if isinstance(params["blocks"], dict):
        x_BTD = jax.lax.scan(lambda x, w: (block(x, w), None), x_BTD, params["blocks"])[0]
    else:
        for weights in params["blocks"]:
            x_BTD = block(x_BTD, weights)
    return jnp.mean(x_BTD**2)


def step(params, x_BTD):
    """One step of SGD."""
    value, gradients = jax.value_and_grad(loss)(params, x_BTD)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def compiled(devices, layout):
    """The text that the compiler of these devices makes of the step in one layout."""
    shape, table, scanned = LAYOUTS[layout]
    devices = np.array(devices).reshape(shape)
    mesh = Mesh(devices, ("batch", "model"), axis_types=(AxisType.Auto,) * 2)
    array = lambda shape, spec: jax.ShapeDtypeStruct(
        shape, jnp.float32, sharding=NamedSharding(mesh, spec))
    if scanned:
        blocks = {name: array((L, *SHAPES[name]), P(None, *table[name])) for name in SHAPES}
    else:
        blocks = [{name: array(SHAPES[name], table[name]) for name in SHAPES} for _ in range(L)]
    params = {"position": array((T, D), P()), "blocks": blocks}
    places = jax.tree.map(lambda leaf: leaf.sharding, params)
    made = jax.jit(step, out_shardings=(places, None), donate_argnums=0)
    return made.lower(params, array((B, T, D), P("batch"))).compile().as_text()


def first_token(weights, x_BTD):
    """Gradients of an MLP of whose output one token is read, as a classifier reads a ViT's."""
    def loss(weights):
        y_BTD = x_BTD + jax.nn.relu(x_BTD @ weights["up"]) @ weights["down"]
        return jnp.mean(y_BTD[:, 0] ** 2)
    return jax.grad(loss)(weights)


def grouped(weights, x_ND):
    """Gradients of a ragged matmul: N tokens, each of one of G experts."""
    def loss(x_ND, w_GDF):
        return jnp.sum(jax.lax.ragged_dot(x_ND, w_GDF, weights["sizes"]) ** 2)
    return jax.grad(loss, (0, 1))(x_ND, weights["experts"])


HARD = {  # function, shapes of its weights, shape of its input
    "first-token": (first_token, {"up": (D, F), "down": (F, D)}, (2 * B, T + 1, D)),
    "ragged": (grouped, {"experts": (4, D, F), "sizes": (4,)}, (B * 8, D)),
}


def compiled_alone(device, name):
    """The text that the compiler of this device makes of one of HARD."""
    function, shapes, x = HARD[name]
    where = jax.sharding.SingleDeviceSharding(device)
    array = lambda shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype, sharding=where)
    weights = {name: array(shape, jnp.int32 if name == "sizes" else jnp.float32)
               for name, shape in shapes.items()}
    return jax.jit(function).lower(weights, array(x)).compile().as_text()


def main(platform):
    """Compile all layouts for one platform and save their texts."""
    if platform in TOPOLOGIES | OTHERS:
        from jax.experimental import topologies
        name, options = (TOPOLOGIES | OTHERS)[platform]
        devices = topologies.get_topology_desc(
            platform="tpu", topology_name=name, **options).devices
    else:
        jax.config.update("jax_num_cpu_devices", 8)
        devices = jax.devices()
    layouts = ("tensor",) if platform in OTHERS else LAYOUTS
    texts = {layout: compiled(devices, layout) for layout in layouts}
    if platform == "v5e":
        texts |= {name: compiled_alone(devices[0], name) for name in HARD}
    for name, text in texts.items():
        here = pathlib.Path(__file__).resolve()
        text = text.replace(str(here), here.name)
        path = here.with_name(f"{platform}-{name}.txt.gz")
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
        print(path.name, path.stat().st_size)


if __name__ == "__main__":
    for platform in sys.argv[1:]:
        main(platform)
