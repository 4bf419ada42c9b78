"""A tiny ViT and its batches, its training as one side of a proof, and where its tensors lie."""
import jax
import numpy as np
import optax
from flax import nnx

from meshbook import training
from meshbook.data.augmentation import Preparation
from meshbook.models import ViT, ViTConfig
from meshbook.sharding import Sharding, make_mesh

KEY = jax.random.key(7)
QUICKLY = {"xla_backend_optimization_level": 0}  # the same HLO, half the compile time
TENSOR_PARALLEL = {"H": "model", "F": "model", "V": "model"}
# Written down once more: what a test expects must not come from the rules that it checks.
RULES = {
    "tensor_parallel": TENSOR_PARALLEL,
    "fully_sharded": TENSOR_PARALLEL | {"D": "batch"},
}
CONFIG = ViTConfig(embed=32, hidden=64, heads=4, layers=2, patch=8)
B = 16
PREPARE = Preparation((0.5,) * 3, (0.25,) * 3, True)


def batch(seed, rows=B):
    random = np.random.default_rng(seed)
    labels = random.integers(0, 10, rows).astype(np.int32)
    images = random.integers(0, 256, (rows, 32, 32, 3)).astype(np.uint8)
    return {"inputs": images, "labels": labels}


BATCHES = [batch(seed) for seed in range(20)]


def make_state(row="none", shape=(1, 1), optimizer=optax.adam(1e-3), config=CONFIG):
    make = lambda: ViT(config, getattr(Sharding, row)(), rngs=nnx.Rngs(0))
    return training.create_state(make, optimizer, make_mesh(shape), PREPARE)


def run(state, program=None):
    """The training that this program does, from this state."""
    return training.run(state, KEY, program)
