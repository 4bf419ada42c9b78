"""Every parameter starts with the variance of its rule, and no two start with equal numbers."""
import dataclasses
import functools

import numpy as np
import optax
import pytest
from flax import nnx

from meshbook.models import MiniGPT, MiniGPTConfig, ViT, ViTConfig
from meshbook.models.checkpointed_vit import CheckpointedViT
from meshbook.models.decoder import Decoder, DecoderConfig
from meshbook.models.earlier import EarlierViT
from meshbook.models.expert_layers import ExpertSizes
from meshbook.models.fast import FastMiniGPT, FastViT
from meshbook.models.vit import MeanViT
from meshbook.proofs.verdicts import named_leaves
from meshbook.sharding import Sharding, make_mesh
from meshbook.training import create_state

# every size is another one, so that no rule is right by taking one for the other
D, H, K, F, L, C, T, X, V, G, R, P, E, SHARED = 60, 6, 10, 88, 4, 11, 17, 192, 256, 3, 14, 8, 5, 36
VIT = ViTConfig(classes=C, embed=D, hidden=F, heads=H, layers=L, patch=8)
GPT = MiniGPTConfig(vocabulary=250, tokens=T, embed=D, hidden=F, heads=H, layers=L)
SMALL = DecoderConfig(vocabulary=250, tokens=T, embed=D, hidden=F, heads=H, layers=L)
decoder = functools.partial(dataclasses.replace, SMALL)
EXPERTS = ExpertSizes(E, 2, shared=SHARED, biased=True)
MODELS = {
    "ViT": (ViT, VIT), "fast ViT": (FastViT, VIT), "ViT with checkpoints": (CheckpointedViT, VIT),
    "earlier ViT": (EarlierViT, VIT), "ViT without a class token": (MeanViT, VIT),
    "MiniGPT": (MiniGPT, GPT), "fast MiniGPT": (FastMiniGPT, GPT), "decoder": (Decoder, SMALL),
    "groups": (Decoder, decoder(groups=G, bias=True, gated=False)),
    "latent": (Decoder, decoder(latent=R, rotary=P, period=2, bias=True)),
    "experts": (Decoder, decoder(period=2, experts=EXPERTS, bias=True)),
    "experts alone": (Decoder, decoder(gated=False, experts=ExpertSizes(E, 2))),
}
XAVIER = lambda fan_in, fan_out: 2 / (fan_in + fan_out)
ADDED = 1 / (2 * L)  # the share of one of the 2·L terms of a sum whose variance is 1
EARLY = {  # variances of ViT and MiniGPT, by the last part of a leaf's name
    "w_patch_XD": XAVIER(X, D), "position_TD": 1 / 3, "w_qkv_DSHK": XAVIER(D, H * K),
    "w_out_HKD": XAVIER(H * K, D), "w_in_DF": XAVIER(D, F), "w_out_FD": XAVIER(F, D),
    "w_head_DC": XAVIER(D, C)}
TEXT = EARLY | {"token_VD": 1 / D, "position_TD": 1 / D, "w_head_DV": XAVIER(D, V)}
MODERN = {
    "token_VD": 1 / D, "w_query_DHK": 1 / D, "w_kept_DSGK": 1 / D, "w_out_HKD": ADDED / (H * K),
    "w_latent_DSR": 1 / D, "w_query_RHK": 1 / R, "w_kept_RSHK": 1 / R, "w_turned_SRP": 1 / (2 * R),
    "w_turned_query_SRHP": 1 / (2 * R), "w_in_DSF": 1 / D, "w_out_FD": ADDED / F,
    "w_router_DC": 1 / D, "w_in_EDSF": 1 / D, "w_out_EFD": ADDED / F}
OF_SHARED = {"mlp/w_out_FD": ADDED / SHARED}


def constant_of(name):
    """What a leaf of this name is filled with, or None."""
    kind = name.rpartition("/")[2].partition("_")[0]
    return {"b": 0, "bias": 0, "class": 0, "scale": 1, "shift": 0}.get(kind)


def variance_of(model, name, leaves):
    """The variance that the rule of this leaf states."""
    if issubclass(model, Decoder):
        beside_experts = name.replace("mlp/w_out_FD", "experts/w_router_DC") in leaves
        if beside_experts and name.endswith("mlp/w_out_FD"):
            return OF_SHARED["mlp/w_out_FD"]
        return MODERN[name.rpartition("/")[2]]
    return (TEXT if issubclass(model, MiniGPT) else EARLY)[name.rpartition("/")[2]]


@functools.cache
def start(name, seed=0):
    model, config = MODELS[name]
    make = lambda: model(config, Sharding.none(), rngs=nnx.Rngs(seed))
    params = create_state(make, optax.identity(), make_mesh((1, 1))).params
    return {name: np.asarray(leaf) for name, leaf in named_leaves(params).items()}


def parts_of(name, w):
    """Each layer, expert and use of a leaf's numbers by itself: {name: numbers in a row}."""
    letters = name.rpartition("_")[2]
    stacked = w.ndim - len(letters)  # layers
    apart = [*range(stacked), *(stacked + at for at, each in enumerate(letters) if each in "ESL")]
    rows = np.moveaxis(w, apart, range(len(apart)))
    return {f"{name} {place}": rows[place].ravel() for place in np.ndindex(rows.shape[:len(apart)])}


@pytest.mark.parametrize("name", MODELS)
def test_each_leaf_starts_with_the_variance_of_its_rule(name):
    leaves = start(name)
    for path, w in leaves.items():
        if (constant := constant_of(path)) is not None:
            assert (w == constant).all(), path
            continue
        variance = variance_of(MODELS[name][0], path, leaves)
        for where, part in parts_of(path, w).items():
            count, bound = part.size, (3 * variance) ** 0.5  # of uniform numbers
            assert count > 100, where
            assert abs(part.mean()) < 5 * (variance / count) ** 0.5, where
            assert abs(part.var() / variance - 1) < 5 * (0.8 / count) ** 0.5, where
            assert bound * (1 - 10 / count) < np.abs(part).max() <= bound * (1 + 1e-6), where


@pytest.mark.parametrize("name", MODELS)
def test_no_two_leaves_layers_or_experts_start_with_equal_numbers(name):
    parts = {where: part for path, w in start(name).items() if constant_of(path) is None
             for where, part in parts_of(path, w).items()}
    names, least = list(parts), min(part.size for part in parts.values())
    same = np.corrcoef([part[:least] for part in parts.values()])
    np.fill_diagonal(same, 0)
    at = np.unravel_index(np.abs(same).argmax(), same.shape)
    assert np.abs(same).max() < 6 / least ** 0.5, [names[each] for each in at]


@pytest.mark.parametrize("name", ["ViT", "MiniGPT", "latent", "experts"])
def test_another_seed_starts_every_leaf_with_other_numbers(name):
    other = start(name, seed=1)
    for path, w in start(name).items():
        assert constant_of(path) is not None or not (w == other[path]).any(), path


def test_every_kind_of_leaf_is_there():
    seen = {path.rpartition("/")[2] for name in MODELS for path in start(name)}
    ruled = {*EARLY, *TEXT, *MODERN}
    assert {each for each in seen if constant_of(each) is None} == ruled
