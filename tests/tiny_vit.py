"""A ViT's state and its compiled step as one side of `assert_same_training`."""
import jax

from meshbook import proofs
from meshbook.sharding import place
from meshbook.training import gradients

KEY = jax.random.key(7)


def run(state, program):
    """The training that this program does, from this state."""
    mesh = state.program.mesh
    return proofs.Run(
        lambda state, batch: program(state, place(batch, mesh), KEY), state,
        lambda state, batch: gradients(state, place(batch, mesh), KEY),
        lambda state: state.params)
