"""What a checkpoint knows of a run, and says in JSON: leaves, data position, key."""
import base64
import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshbook.proofs.verdicts import named_leaves, path_name
from meshbook.saving import manifests, runs
from meshbook.training import TrainState


def arrays(state: TrainState):
    """What of a TrainState is saved: nested dicts of arrays, without the program."""
    return {name: getattr(state, name) for name in ("step", "params", "opt_state")}


def describe(tree: Any):
    """{path: {shape, dtype, spec}} of every leaf, as JSON has it."""
    spec = lambda x: [list(axis) if isinstance(axis, tuple) else axis
                      for axis in getattr(x.sharding, "spec", ())]
    return {name: {"shape": list(x.shape), "dtype": str(x.dtype), "spec": spec(x)}
            for name, x in named_leaves(tree).items()}


def host_copy(tree: Any):
    """The arrays as NumPy arrays that share no memory with the devices; replicas are read once.

    The next step is given the devices' memory, while these are still being written.
    """
    shards = jax.tree.map(
        lambda x: [each for each in x.addressable_shards if each.replica_id == 0], tree)
    for each in jax.tree.leaves(shards):
        each.data.copy_to_host_async()

    def assemble(x, shards):
        whole = np.empty(x.shape, x.dtype)
        for each in shards:
            whole[each.index] = each.data
        return whole

    return jax.tree.map(assemble, tree, shards)


def digests(tree: Any):
    """{path: SHA-256} of every leaf, a NumPy array: of all its bytes in C order."""
    raw = lambda x: np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    return {name: hashlib.sha256(raw(x)).hexdigest() for name, x in named_leaves(tree).items()}


@jax.jit
def soundness(params: Any, opt_state: Any):
    """Which leaves are fit to be saved: finite parameters, an optimizer without NaN."""
    return {"params": jax.tree.map(lambda x: jnp.isfinite(x).all(), params),
            "opt_state": jax.tree.map(lambda x: ~jnp.isnan(x).any(), opt_state)}


def check_sound(step: int, state: TrainState):
    """Diverged if the next step's loss could not be finite; names the first such leaf."""
    sound = jax.device_get(soundness(state.params, state.opt_state))
    for path, good in jax.tree.leaves_with_path(sound):
        if not good:
            raise runs.Diverged(f"step {step} is not saved: expected finite numbers in "
                                f"{path_name(path)}, found NaN or infinity")


def encode_position(position: Any):
    """Bytes or JSON values as JSON values; TypeError for anything else."""
    if isinstance(position, bytes):
        return {"base64": base64.b64encode(position).decode()}
    manifests.check_json(position)
    return {"json": position}


def decode_position(saved: Mapping[str, Any]):
    """What encode_position() was given."""
    return saved["json"] if "json" in saved else base64.b64decode(saved["base64"])


def encode_key(key: jax.Array):
    """A typed key (jax.random.key) as JSON values."""
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise TypeError(f"expected a key made by jax.random.key, found an array of {key.dtype}")
    return {"impl": str(jax.random.key_impl(key)), "data": jax.random.key_data(key).tolist()}


def decode_key(saved: Mapping[str, Any]):
    """The key that encode_key() was given."""
    return jax.random.wrap_key_data(np.uint32(saved["data"]), impl=saved["impl"])
