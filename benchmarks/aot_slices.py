"""Compile a decoder's step for two slices of a TPU v4 that are not here, and keep the texts.

    python -m benchmarks.aot_slices

Parameters are whole everywhere, in parts within each slice (hybrid), or in parts over all chips.
"""

import lzma

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from meshbook.models.decoder import Decoder, DecoderConfig
from meshbook.models.losses import language_loss
from meshbook.planning import topologies
from meshbook.planning.mesh_programs import SLICES, SLICED, name_of_slices
from meshbook.planning.programs import path_of
from meshbook.sharding import Sharding
from meshbook.training import abstract_state, as_it_is, train_step

ROWS = ("slice", "batch")
RULES = {"whole": Sharding.data_parallel().also(B=ROWS),
         "hybrid": Sharding.fully_sharded(regather=False).also({"B": ROWS}),
         "all chips": Sharding.fully_sharded(regather=False).also({"B": ROWS}, {"D": ROWS})}


def mesh_of_slices():
    """Two slices of four chips: the first axis goes from slice to slice."""
    devices = sorted(topologies.topology(SLICES), key=lambda each: (each.slice_index, each.id))
    return Mesh(np.array(devices).reshape(2, 4, 1), (*ROWS, "model"),
                axis_types=(AxisType.Explicit,) * 3)


def program(how):
    """A step with these rules, and the shapes and layouts of its arguments."""
    mesh, config = mesh_of_slices(), DecoderConfig(**SLICED, dtype=jnp.bfloat16)
    state = abstract_state(lambda: Decoder(config, RULES[how], rngs=nnx.Rngs(0)), optax.sgd(0.1),
                           mesh, as_it_is, language_loss, rows=ROWS)
    ids = jax.ShapeDtypeStruct((32, config.tokens), jnp.int32,
                               sharding=NamedSharding(mesh, P(ROWS)))
    return (train_step, state, {"inputs": ids, "labels": ids},
            jax.eval_shape(lambda: jax.random.key(0)))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_traceback_in_locations_limit", 0)  # these name files of this machine
    for how in RULES:
        text = topologies.text_for(SLICES, *program(how))
        path = path_of(name_of_slices(how))
        path.write_bytes(lzma.compress(text.encode()))
        print(f"{path.name}: {len(text):,} characters")
