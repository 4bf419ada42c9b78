"""Where tokens of a context lie, and which sharding rules attention over split tokens refuses."""
from dataclasses import replace

import jax
import pytest
from numpy.testing import assert_array_equal

from meshbook.models.context_attention import check_tokens, places_of
from meshbook.models.decoder import DecoderConfig
from meshbook.parallel.context import Context
from meshbook.sharding import Sharding, make_mesh

CONFIG = DecoderConfig(500, tokens=16, embed=48, hidden=64, heads=4, layers=2)


def test_tokens_lie_in_order_unless_they_are_zigzagged():
    rules = Sharding.tensor_parallel()
    with jax.set_mesh(make_mesh((2, 2, 2), ("batch", "context", "model"))):
        for context in None, Context(), Context("gather"), Context("ulysses"):
            assert places_of(replace(rules, context=context), 16) is None
        places = places_of(replace(rules, context=Context(zigzagged=True)), 16)
    # two devices have the first and the last of four blocks of tokens, and the two between
    assert_array_equal(places, [0, 1, 2, 3, 12, 13, 14, 15, 4, 5, 6, 7, 8, 9, 10, 11])


def test_tokens_split_over_an_axis_of_which_heads_know_nothing_are_refused():
    rules = Sharding.tensor_parallel()
    check_tokens(CONFIG, rules)
    check_tokens(CONFIG, Sharding.sequence_parallel())
    wrong = replace(rules, activations={**rules.activations, "T": "model", "F": None})
    with pytest.raises(ValueError, match="T is split over model, and F is not"):
        check_tokens(CONFIG, wrong)
    check_tokens(CONFIG, replace(wrong, context=Context(axis="model")))


def test_latents_have_no_context():
    rules = replace(Sharding.tensor_parallel(), context=Context())
    with pytest.raises(ValueError, match="keys and values of heads; found latent=8"):
        check_tokens(replace(CONFIG, latent=8, rotary=4), rules)
