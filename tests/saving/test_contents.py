"""What a checkpoint has beside its arrays: the key of a run."""
import json

import jax
import jax.numpy as jnp
import pytest

from meshbook.saving import contents


@pytest.mark.parametrize("impl", ("threefry2x32", "rbg", "unsafe_rbg"))
def test_a_key_comes_back_with_its_generator(impl):
    key = jax.random.key(7, impl=impl)
    back = contents.decode_key(json.loads(json.dumps(contents.encode_key(key))))
    assert back.dtype == key.dtype and (jax.random.bits(back, 9) == jax.random.bits(key, 9)).all()


def test_an_array_of_numbers_is_no_key():
    for old in jax.random.PRNGKey(7), jnp.zeros(2):
        with pytest.raises(TypeError, match=f"by jax.random.key, found an array of {old.dtype}"):
            contents.encode_key(old)
