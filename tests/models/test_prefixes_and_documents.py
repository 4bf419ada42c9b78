"""A prefix alone gives what it gives in a longer row, a document alone what it gives behind others.

Of values and of gradients, for every language model and every split of tokens. Each token of a
batch is another one, so that the gradient of its embedding is that of its place.
"""
import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from moved import moved

from meshbook.models import MiniGPT, MiniGPTConfig
from meshbook.models.decoder import Decoder, DecoderConfig
from meshbook.models.expert_layers import ExpertSizes
from meshbook.models.fast import FastMiniGPT
from meshbook.parallel.context import Context
from meshbook.parallel.zigzag import zigzag_order
from meshbook.sharding import Sharding, make_mesh
from meshbook.training import create_state

B, T, PART = 2, 30, 18  # tokens of a row, and of a part of it
FIRST = np.array([[5], [9]])  # where such a part of each row begins: a document among others
SMALL = DecoderConfig(vocabulary=300, tokens=T, embed=24, hidden=36, heads=6, layers=2)
GPT = MiniGPTConfig(vocabulary=300, tokens=T, embed=24, hidden=36, heads=6, layers=2)
decoder = functools.partial(dataclasses.replace, SMALL)
DROPPING = ExpertSizes(6, 2, capacity=0.75, shared=12)
KINDS = {
    "MiniGPT": GPT, "fast MiniGPT": GPT, "plain": SMALL,
    "groups": decoder(groups=3, bias=True, gated=False),
    "groups by row": decoder(groups=3, by_row=True, remat="products"),
    "latent": decoder(latent=8, rotary=4, period=2, bias=True),
    "latent by row": decoder(latent=8, rotary=4, by_row=True, remat="attention"),
    "capacity": decoder(experts=DROPPING, remat="all"),
    "dropless": decoder(experts=ExpertSizes(6, 2, block=8), bias=True),
    "biased": decoder(experts=ExpertSizes(6, 2, router="sigmoid", biased=True, block=8)),
}
MODELS = {"MiniGPT": MiniGPT, "fast MiniGPT": FastMiniGPT}
SPLITS = {  # on two rows of three devices
    "sequence": Sharding.sequence_parallel(),
    "sequence, overlapped": Sharding.sequence_parallel(overlapped=True, regather=True),
    "ring": Sharding.context_parallel(Context(block=3)),
    "zigzag": Sharding.context_parallel(Context(zigzagged=True, block=3)),
    "zigzag, hidden units": Sharding.context_parallel(
        Context(zigzagged=True, block=3)).also(F="context"),
    "gather": Sharding.context_parallel(Context("gather", block=4)),
    "gather, zigzag": Sharding.context_parallel(Context("gather", zigzagged=True, block=2)),
    "ulysses": Sharding.context_parallel(Context("ulysses", block=7)),
}
CASES = [*((kind, None) for kind in KINDS),
         ("plain", "sequence"), ("latent", "sequence, overlapped"), ("capacity", "sequence"),
         ("groups", "ring"), ("groups", "zigzag"), ("plain", "gather"),
         ("groups", "gather, zigzag"), ("groups", "ulysses"), ("dropless", "zigzag, hidden units"),
         ("capacity", "zigzag, hidden units")]
RANDOM = np.random.default_rng(0)
TOKENS = RANDOM.permutation(300)[:B * T].reshape(B, T).astype(np.int32)
WEIGHTS = RANDOM.normal(size=(B, T, 24)).astype(np.float32)
AT = np.arange(T) + np.zeros((B, 1), np.int32)
ONE = {"segments": 0 * AT, "positions": AT}
PREFIX, SECOND = AT < PART, (AT >= FIRST) & (AT < FIRST + PART)
NUMBER = 1 * (AT >= FIRST) + (AT >= FIRST + PART)  # of the document of each token
DOCUMENTS = {"segments": NUMBER, "positions": (
    AT - np.take_along_axis(np.hstack([0 * FIRST, FIRST, FIRST + PART]), NUMBER, 1))}


def taken(x, part):
    """Tokens of a part of each row, as rows."""
    return x[part].reshape(B, PART, *x.shape[2:])


@functools.cache
class Model:
    """A model of this kind under these rules, none of whose parameters is 0 or 1."""

    def __init__(self, kind, split=None):
        rules = SPLITS[split] if split else Sharding.none()
        axes = ("batch", "context" if rules.context else "model")
        make = lambda: MODELS.get(kind, Decoder)(KINDS[kind], rules, rngs=nnx.Rngs(0))
        mesh = make_mesh((2, 3) if split else (1, 1), axes)
        self.state = create_state(make, optax.sgd(0.1), mesh)
        self.params = moved(self.state.params, 0.1)
        self.in_zigzag = rules.context is not None and rules.context.zigzagged

        @functools.partial(jax.jit, static_argnames="learns")
        def found(params, tokens, weights, learns, **documents):
            def total(params):
                hidden = self.state.program.model(params).hidden(tokens, **documents)
                return (hidden * weights).sum(), hidden

            return jax.grad(total, has_aux=True)(params) if learns else total(params)

        self.found = found

    def __call__(self, tokens, part=None, **documents):
        """What the head would read, and the gradient of a sum over a part to each token."""
        order = zigzag_order(tokens.shape[1], 3) if self.in_zigzag else np.arange(tokens.shape[1])
        weights = WEIGHTS * part[..., None] if part is not None else WEIGHTS[:, :tokens.shape[1]]
        batch = {"tokens": tokens, "weights": weights} | documents
        placed = self.state.program.place({name: x[:, order] for name, x in batch.items()})
        with jax.set_mesh(self.state.program.mesh):
            gradients, hidden = jax.device_get(self.found(
                self.params, **placed, learns=part is not None))
        slopes = None if part is None else np.linalg.norm(gradients["token_VD"][tokens], axis=-1)
        return hidden[:, np.argsort(order)], slopes


@pytest.mark.parametrize("kind, split", CASES)
def test_a_part_of_a_row_is_as_if_it_stood_alone(kind, split):
    model = Model(kind, split)
    row, slopes = model(TOKENS, PREFIX, **ONE)
    alone, _ = model(taken(TOKENS, PREFIX))
    np.testing.assert_allclose(taken(row, PREFIX), alone, atol=2e-5)
    assert (slopes[~PREFIX] == 0).all() and slopes[PREFIX].min() > 1e-3
    if split:
        np.testing.assert_allclose(row, Model(kind)(TOKENS, PREFIX, **ONE)[0], atol=2e-5)
    if kind == "capacity":  # slots are those of a row, whatever its documents
        return
    packed, slopes = model(TOKENS, SECOND, **DOCUMENTS)
    alone, _ = model(taken(TOKENS, SECOND))
    np.testing.assert_allclose(taken(packed, SECOND), alone, atol=2e-5)
    assert (slopes[~SECOND] == 0).all() and slopes[SECOND].min() > 1e-3
    assert np.abs(packed - row)[SECOND].max(-1).min() > 1e-3
