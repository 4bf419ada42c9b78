"""In a proof of the same training nothing is sent where its bytes are not counted."""
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from tiny_mlp import B, BATCHES, D, SPECS, STEP, mesh_of, plain, put, split, weights

from meshbook import proofs
from meshbook.proofs import ProofFailed


def test_a_step_that_sends_past_its_program_is_refused():
    mesh = mesh_of()

    def resent(state, x):
        rows = jax.device_put(x, NamedSharding(mesh, P("model")))  # from the host: not counted
        return STEP(state, jax.device_put(rows, NamedSharding(mesh, P("batch"))))

    with pytest.raises(ProofFailed, match=(
            r"step 0: expected nothing to be sent outside of the compiled program, found 1 arrays "
            rf"and {8 * 4 * B // 4 * D:,} bytes by jax.device_put")):
        proofs.assert_same_training(split(mesh, step=resent), plain(), BATCHES[:2])
    swapped = plain(step=split(mesh).step, state=put(weights(), mesh, SPECS))
    proofs.assert_same_training(swapped, plain(step=resent, state=put(weights(), mesh, SPECS)),
                                BATCHES[:2])  # a reference may do as it likes


def test_a_step_whose_jit_moves_an_argument_is_refused():
    moved = lambda state, x: STEP(state, jnp.asarray(x))  # on device 0, where no mesh is
    with pytest.raises(ProofFailed, match="expected arguments that lie where the program wants"):
        proofs.assert_same_training(split(mesh_of(), step=moved), plain(), BATCHES[:2])


def test_an_error_of_the_step_itself_stays_what_it_is():
    def broken(state, x):
        raise jax.errors.JaxRuntimeError("out of memory")

    with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory"):
        proofs.assert_same_training(split(mesh_of(), step=broken), plain(), BATCHES[:2])
