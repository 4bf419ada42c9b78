"""Parameters under other rules, and the means of what a loss says of whole batches."""
from functools import partial

import jax
import numpy as np
import pytest
from flax import nnx
from tiny_gpt import BATCHES as ROWS, CONFIG as TEXTS
from tiny_vit import BATCHES, make_state

from meshbook.models import MiniGPT, generate
from meshbook.models.decoder import Decoder, DecoderConfig
from meshbook.models.losses import language_loss
from meshbook.models.pipelined import pipelined
from meshbook.parallel.accumulation import in_microbatches
from meshbook.parallel.pipeline import one_f_one_b
from meshbook.sharding import Sharding, make_mesh
from meshbook.training import create_state, evaluate, laid_out, mean_metrics, recipe

CONFIG = DecoderConfig(TEXTS.vocabulary, tokens=16, embed=32, hidden=64, heads=4, layers=4)
AXES = "batch", "stage", "model"


def decoder(rules, loss, config=CONFIG):
    make = lambda: Decoder(config, rules, rngs=nnx.Rngs(0))
    return make, create_state(make, recipe(10), make_mesh((2, 2, 2), AXES), loss=loss)


def test_what_stages_have_is_put_together_and_writes_the_same():
    staged, whole = Sharding.tensor_parallel().in_stages(), Sharding.tensor_parallel()
    _, state = decoder(staged, pipelined(one_f_one_b, 4))
    make, expected = decoder(whole, language_loss)
    found = laid_out(state, make)
    for one, other in zip(*map(jax.tree.leaves, (found.params, expected.params)), strict=True):
        assert one.sharding == other.sharding and np.array_equal(one, other)
    write = partial(generate, prompts=[[1, 2, 3]], length=8, key=jax.random.key(0))
    assert write(found) == write(expected)


def test_parameters_of_another_model_are_refused():
    _, state = decoder(Sharding.none(), language_loss)
    other = lambda: MiniGPT(TEXTS, Sharding.none(), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="expected the parameters of the other model"):
        laid_out(state, other)


def test_means_are_those_of_evaluate_and_the_same_in_parts_and_by_stages():
    state = make_state()
    assert mean_metrics(state, BATCHES[:3]) == pytest.approx(evaluate(state, BATCHES[:3]), rel=1e-6)
    rules = Sharding.tensor_parallel()
    _, state = decoder(rules, language_loss)
    expected = mean_metrics(state, ROWS[:2])
    for rules, loss in ((rules, in_microbatches(language_loss, 4)),
                        (rules.in_stages(), pipelined(one_f_one_b, 4))):
        _, state = decoder(rules, loss)
        assert mean_metrics(state, ROWS[:2]) == pytest.approx(expected, rel=1e-5)


def test_means_need_a_batch():
    with pytest.raises(ValueError, match="at least one batch"):
        mean_metrics(make_state(), [])
