"""What models are made of: parameters, products, and what a layer keeps for the backward pass.

The letters are dimensions: B rows of a batch, T tokens as they lie between products, W tokens as a
product sees them (whole, where T is split over "model"), U tokens whose keys a query meets, D
embed, F hidden, H heads, K head size, G groups of heads, R latent, P rotary part, V vocabulary, O
tokens that exist, X numbers of a patch, N patches, C classes (of an image, or of a router), E
experts, A experts of a token, Z slots of an expert for a row, M hidden units of the expert that all
tokens share. Flags are those of `flags_of` and `kinds_of`; "blocks" and "fused" say how attention
is done, "model" that an axis splits heads. The page of the calculator reads the same tables.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshbook.costs.rows import Kept, Row, Table
from meshbook.models.decoder_config import DecoderConfig
from meshbook.models.minigpt import MiniGPTConfig
from meshbook.models.vit import ViTConfig
from meshbook.parallel import routing


def vector(letters: str, count: int = 1, when: str = "", backward: str = "again", **more: Any):
    """A Row of biases or scales."""
    return Row(">" + letters, count, when, backward=backward, is_product=False, **more)


SCALE = vector("D", backward="always", exact=True)
SHIFT = vector("D", exact=True)


def scores_and_values(inside: str):
    """The products of scores and values, of which each head has its own.

    Row by row scores are computed again whatever is kept, and twice where the whole layer is. What
    blocks, or a fused kernel, give is no product that a policy could keep.
    """
    found = []
    for when, scores, values in (
            ("scores", "products attention all", "products all"),
            ("-scores -blocks", "none products attention all all", "all"),
            ("blocks", "none products products attention all all", "products all")):
        found.append(Row("HK>HU", when=when, again=scores, is_parameter=False))
        if inside == "latent":
            found.append(Row("P>HU", when=f"{when} turned", again=scores, is_parameter=False,
                             reads="latents/turned keys"))
        found.append(Row("HU>HK", when=when, again=values, is_parameter=False))
    return tuple(found)


PLAIN = (  # the layer of the ViT and of MiniGPT
    SCALE, SCALE, SHIFT, SHIFT,
    Row("D>SHK", reads="attention"), vector("SHK"), *scores_and_values("heads"),
    Row("HK>D"), vector("D"),
    Row("D>F", reads="MLP"), vector("F"), Row("F>D", again=""), vector("D", backward="never"))
PLAIN_KEPT = (
    Kept("BWF", bytes=4), Kept("BHWU", bytes=4, when="scores"), Kept("BWHK", 4, bytes=2),
    Kept("BHW", 2, bytes=4), Kept("BTD", 2, bytes=4))
IDS = (Kept("BT", 2, bytes=4),)
TEXT = dict(T="tokens", W="tokens", U="tokens", D="embed", F="hidden", H="heads", K="head_size",
            V="padded", O="vocabulary")
VIT = Table(
    dims=dict(T="tokens", W="tokens", U="tokens", D="embed", F="hidden", H="heads", K="head_size",
              S="3", X="patch patch 3", I="image image 3", N="patches", C="classes"),
    first=(Row("X>D", tokens="BN", gradients=1), vector("D"), vector("TD"),
           vector("D", travels=False)),  # the class token's gradient is that of the first position
    layer=PLAIN,
    last=(SCALE, SHIFT, Row("D>C", tokens="B", reads="head"), vector("C")),
    inputs=(Kept("BI", bytes=4),),
    logits=4,
    kept={"none": (*PLAIN_KEPT, Kept("BWF", bytes=1, when="dropout"),
                   Kept("BTD", bytes=1, when="dropout")),
          "all": (Kept("BTD", bytes=4),)})
MINIGPT = Table(
    dims=TEXT | dict(S="3"),
    first=(Row("V>D", is_product=False), vector("TD")),
    layer=PLAIN,
    last=(Row("D>V", useful="BTDO", reads="head"), vector("V")),
    inputs=IDS,
    logits=2,
    kept={"none": (*PLAIN_KEPT, Kept("BTD", 2, bytes=1, when="dropout")),
          "all": (Kept("BTD", bytes=4),)})

MLP = (
    Row("D>F", when="dense", and_one_if="gated", reads="MLP"),
    vector("F", when="dense bias", and_one_if="gated"),
    Row("F>D", when="dense", again=""), vector("D", when="dense bias", backward="never"))
SLOTS = dict(tokens="BZ", useful="BTADF", again="products attention all")  # never kept
EXPERTS = (
    Row("D>C", when="experts", reads="router"), vector("C", when="experts bias"),
    vector("C", when="experts biased", travels=False),  # loads in its place, which are sums already
    Row("ED>EF", when="experts", and_one_if="gated", reads="experts", **SLOTS),
    vector("EF", when="experts bias", and_one_if="gated"),
    Row("EF>ED", when="experts", **SLOTS),
    Row("A>F", when="experts", reads="gates", exact=True, is_parameter=False, is_product=False),
    vector("ED", when="experts bias", inside="F"),
    Row("D>M", when="shared", and_one_if="gated", reads="shared"),
    vector("M", when="shared bias", and_one_if="gated"),
    Row("M>D", when="shared", again=""), vector("D", when="shared bias", backward="never"))
LOG_SUMS = Kept("BHW", bytes=4, when="blocks")  # of what each query's scores add up to
READ = (  # by the products of a layer, queries, keys and values, and what heads find
    Kept("BTD", when="latent"), Kept("BWD", when="-latent"), Kept("BWD"),
    Kept("BWR", 2, when="latent"), Kept("BWHK", 3, when="latent"),
    Kept("BWHP", when="turned"), Kept("BWP", when="turned"),
    Kept("BTR", 2, when="turned"), Kept("BWR", 2, when="turned model"),
    Kept("BWHK", when="-latent"), Kept("BWGK", 2, when="-latent"),
    Kept("BWHK"), Kept("BWHK", when="latent bias -scores"))
SCORES = (Kept("BHWU", bytes=4, when="scores"), Kept("BHWU", when="scores"),
          Kept("BHW", 2, bytes=4, when="scores"))
SLOTS_KEPT = (Kept("BEZD", 2, when="experts"), Kept("BEZF", when="experts"),
              Kept("BEZF", when="experts gated"), Kept("BWM", 6, when="shared"))
HEADS = (
    Row("D>HK", when="-latent", reads="attention"), vector("HK", when="-latent bias"),
    Row("D>GK", 2, when="-latent", reads="attention"), vector("GK", 2, when="-latent bias"))
LATENT = (  # of queries, and of keys and values
    Row("D>R", 2, when="latent", reads="attention"), vector("R", 2, when="latent bias"),
    Row("R>HK", when="latent", reads="latents/of queries"), vector("HK", when="latent bias"),
    Row("R>P", 2, when="turned", reads="latents/of keys"), vector("P", when="turned bias"),
    Row("R>HP", 2, when="turned", reads="latents/of queries"), vector("HP", when="turned bias"),
    Row("R>HK", 2, when="latent", reads="latents/of keys"), vector("HK", 2, when="latent bias"))
DECODER = Table(
    dims=TEXT | dict(G="groups|heads", R="latent", P="rotary", E="experts", C="experts",
                     A="active", Z="slots", M="shared"),
    first=(Row("V>D", is_product=False),),
    last=(SCALE, replace(SHIFT, when="bias"),
          Row("D>V", is_parameter=False, of="VD", useful="BTDO", reads="head")),
    inputs=IDS,
    layer=(SCALE, SCALE, replace(SHIFT, when="bias"), replace(SHIFT, when="bias"),
           *HEADS, *LATENT, *scores_and_values("latent"), Row("HK>D"), vector("D", when="bias"),
           *MLP, *EXPERTS),
    kept={
        "all": (Kept("BTD"),),
        "attention": (Kept("BTD"), Kept("BWHK"), LOG_SUMS),
        "products": (
            Kept("BTD"), Kept("BWD"), Kept("BTR", 2, when="latent"),
            Kept("BWHK", 3, when="latent"), Kept("BWHP", when="turned"), Kept("BTP", when="turned"),
            Kept("BWHK", when="-latent"), Kept("BWGK", 2, when="-latent"),
            Kept("BWF"), Kept("BWF", when="gated"), LOG_SUMS),
        "none": (
            Kept("BTD", 6, bytes=4), Kept("BT", 4, bytes=4),  # two norms
            *READ, *SCORES, LOG_SUMS,
            Kept("BTD", 2, bytes=1, when="dropout"), Kept("BWF", 6, when="dense"), *SLOTS_KEPT)},
    working=(*READ, *SCORES, Kept("BTD", 2, bytes=1, when="dropout"),
             Kept("BWF", 4, when="dense"), *SLOTS_KEPT),
    stacked=True)
TABLES = {ViTConfig: VIT, MiniGPTConfig: MINIGPT, DecoderConfig: DECODER}


def table_of(config: Any):
    """The Table of a config's model. Raises TypeError for a config that has none."""
    if type(config) not in TABLES:
        raise TypeError(f"expected a config of {', '.join(each.__name__ for each in TABLES)}; "
                        f"found {type(config).__name__}")
    return TABLES[type(config)]


def fields_of(config: Any):
    """{name: number} of what a table's dims can name."""
    names = ("tokens", "embed", "hidden", "heads", "head_size", "padded", "vocabulary", "patch",
             "image", "classes", "groups", "latent", "rotary")
    found = {name: getattr(config, name) for name in names if hasattr(config, name)}
    if isinstance(config, ViTConfig):
        found["patches"] = config.tokens - 1
    if experts := getattr(config, "experts", None):
        slots = experts.capacity and routing.capacity(
            experts.capacity, config.tokens, experts.active, experts.count)
        found |= {"experts": experts.count, "active": experts.active, "shared": experts.shared,
                  "slots": slots}
    return found


def sizes_of(config: Any):
    """{letter: size} of a model's dimensions, 0 for those that it does not have."""
    known, found = fields_of(config), {}
    for letter, said in table_of(config).dims.items():
        size = 1
        for word in said.split():
            names = word.split("|")
            size *= int(word) if word.isdigit() else next(
                filter(None, (known.get(name, 0) for name in names)), 0)
        found[letter] = size
    return found


def flags_of(config: Any):
    """The flags that all layers of a model have, as far as its config sets them."""
    experts = getattr(config, "experts", None)
    on = {"gated": getattr(config, "gated", False), "bias": getattr(config, "bias", True),
          "latent": getattr(config, "latent", 0), "dropout": config.dropout,
          "scores": not getattr(config, "by_row", False), "shared": experts and experts.shared,
          "biased": experts and experts.biased}
    return {name for name, value in on.items() if value}


def kinds_of(config: Any):
    """[(how many layers, their flags)]: the last of a period has no positions, and the experts.

    "positions" sets the kinds apart, also where nothing else does.
    """
    flags, period = flags_of(config), getattr(config, "period", 1)
    own = flags - {"shared", "biased"}
    turned = {"positions"} | ({"turned"} if getattr(config, "rotary", 0) else set())
    last = flags | {"experts"} if getattr(config, "experts", None) else own | {"dense"}
    periods = config.layers // period
    if period == 1:
        return [(periods, last | turned)]
    return [(periods * (period - 1), own | {"dense"} | turned), (periods, last)]
