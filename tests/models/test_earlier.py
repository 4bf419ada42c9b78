"""The ViT as it was: the same logits and gradients, whichever of the changes are undone."""
import functools

import jax
import numpy as np
import pytest
from flax import nnx
from meshes import on_one_device
from tiny_vit import BATCHES, STILL, CONFIG, KEY, compiled, normalised, run

from meshbook import proofs
from meshbook.models import ViT
from meshbook.models.earlier import CHANGES, EarlierViT
from meshbook.sharding import Sharding


@pytest.mark.parametrize("row, shape, undone", [
    ("data_parallel", (8, 1), CHANGES), ("tensor_parallel", (4, 2), CHANGES),
    *(("tensor_parallel", (4, 2), (each,)) for each in CHANGES)])
def test_every_change_leaves_the_training_as_it_was(row, shape, undone):
    earlier = functools.partial(EarlierViT, undone=undone)
    programs = [compiled(row, shape, STILL, model=kind, prepare=normalised)
                for kind in (earlier, ViT)]
    proofs.assert_same_training(*(run(*each) for each in programs), BATCHES[:3])


@on_one_device
def test_only_another_mask_draws_other_numbers():
    images = normalised(BATCHES[0]["inputs"])
    logits = lambda model: np.asarray(jax.jit(lambda x: model(x, key=KEY))(images))
    build = lambda kind, **more: logits(kind(CONFIG, Sharding.none(), rngs=nnx.Rngs(0), **more))
    now = build(ViT)
    np.testing.assert_allclose(build(EarlierViT, undone=CHANGES[1:]), now, atol=2e-5)
    assert np.abs(build(EarlierViT, undone=CHANGES[:1]) - now).max() > 0.01


@on_one_device
def test_a_change_that_nobody_knows_is_refused():
    with pytest.raises(ValueError, match=r"expected changes of .*; found \['speed'\]"):
        EarlierViT(CONFIG, Sharding.none(), rngs=nnx.Rngs(0), undone=["speed"])
