"""What models are made of: parameters, products, and what a layer keeps for the backward pass.

The letters are dimensions: B rows of a batch, T tokens as they lie between products, W tokens as a
product sees them (whole, where T is split over "model"), U tokens whose keys a query meets, D
embed, F hidden, H heads, K head size, G groups of heads, R latent, P rotary part, V vocabulary, O
tokens that exist, X numbers of a patch, N patches, C classes (of an image, or of a router), E
experts, A experts of a token, Z slots of an expert for a row, M hidden units of the expert that all
tokens share, S arrays that are one, L layers that are. Flags are those of `flags_of` and
`kinds_of`; "blocks" and "fused" say how attention is done, "model" that an axis splits heads,
"exchanged" that devices have heads of all tokens while they attend. The site's pages read the same
tables.
"""
from __future__ import annotations

import functools
from collections.abc import Set
from typing import Any

from meshbook.costs.rows import Kept, Row, Table
from meshbook.models.decoder_config import DecoderConfig
from meshbook.models.minigpt import MiniGPTConfig
from meshbook.models.vit import ViTConfig
from meshbook.parallel import routing


def vector(letters: str, name: str, count: int = 1, when: str = "", backward: str = "again",
           **more: Any):
    """A Row of biases or scales."""
    return Row(">" + letters, name, count, when, backward=backward, is_product=False, **more)


def norm_rows(name: str, shift: str = "shift_D", when: str = ""):
    """The scale of a norm, and its shift, which a layer has under a flag."""
    return (vector("D", f"{name}/scale_D", backward="always", exact=True),
            vector("D", f"{name}/{shift}", when=when, exact=True))


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
                             reads="heads/turned keys"))
        found.append(Row("HU>HK", when=when, again=values, is_parameter=False))
    return tuple(found)


PLAIN = (  # the layer of the ViT and of MiniGPT
    *norm_rows("norm1", "bias_D"), *norm_rows("norm2", "bias_D"),
    Row("D>HK", "attention/w_qkv_DSHK", 3, reads="attention"),
    vector("HK", "attention/b_qkv_SHK", 3), *scores_and_values("heads"),
    Row("HK>D", "attention/w_out_HKD"), vector("D", "attention/b_out_D"),
    Row("D>F", "mlp/w_in_DF", reads="MLP"), vector("F", "mlp/b_in_F"),
    Row("F>D", "mlp/w_out_FD", again=""), vector("D", "mlp/b_out_D", backward="never"))
PLAIN_KEPT = (
    Kept("BWF", bytes=4), Kept("BHWU", bytes=4, when="scores"), Kept("BWHK", 4, bytes=2),
    Kept("BHW", 2, bytes=4), Kept("BTD", 2, bytes=4))
IDS = (Kept("BU", 2, bytes=4),)  # whole rows: a batch is split by rows alone
TEXT = dict(T="tokens", W="tokens", U="tokens", D="embed", F="hidden", H="heads", K="head_size",
            V="padded", O="vocabulary")
VIT = Table(
    dims=dict(T="tokens", W="tokens", U="tokens", D="embed", F="hidden", H="heads", K="head_size",
              X="patch patch 3", I="image image 3", N="patches", C="classes"),
    first=(Row("X>D", "w_patch_XD", tokens="BN", gradients=1), vector("D", "b_patch_D"),
           vector("TD", "position_TD"),
           vector("D", "class_D", travels=False)),  # its gradient is that of the first position
    layer=PLAIN,
    last=(*norm_rows("norm", "bias_D"), Row("D>C", "w_head_DC", tokens="B", reads="head"),
          vector("C", "b_head_C")),
    inputs=(Kept("BI", bytes=4),),
    logits=4,
    kept={"none": (*PLAIN_KEPT, Kept("BWF", bytes=1, when="dropout"),
                   Kept("BTD", bytes=1, when="dropout")),
          "all": (Kept("BTD", bytes=4),)})
MINIGPT = Table(
    dims=TEXT,
    first=(Row("V>D", "token_VD", is_product=False), vector("TD", "position_TD")),
    layer=PLAIN,
    last=(Row("D>V", "w_head_DV", useful="BTDO", reads="head"), vector("V", "b_head_V")),
    inputs=IDS,
    logits=2,
    kept={"none": (*PLAIN_KEPT, Kept("BTD", 2, bytes=1, when="dropout")),
          "all": (Kept("BTD", bytes=4),)})

MLP = (
    Row("D>F", "mlp/w_in_DSF", when="dense", and_one_if="gated", reads="MLP"),
    vector("F", "mlp/b_in_SF", when="dense bias", and_one_if="gated"),
    Row("F>D", "mlp/w_out_FD", when="dense", again=""),
    vector("D", "mlp/b_out_D", when="dense bias", backward="never"))
SLOTS = dict(tokens="BZ", useful="BTADF", again="products attention all")  # never kept
EXPERTS = (
    Row("D>C", "experts/w_router_DC", when="experts", reads="router"),
    vector("C", "experts/b_router_C", when="experts bias"),
    vector("C", "experts/b_choice_C", when="experts biased", travels=False),  # loads, in its place
    Row("ED>EF", "experts/w_in_EDSF", when="experts", and_one_if="gated", reads="experts", **SLOTS),
    vector("EF", "experts/b_in_ESF", when="experts bias", and_one_if="gated"),
    Row("EF>ED", "experts/w_out_EFD", when="experts", **SLOTS),
    Row("A>F", when="experts", reads="gating", exact=True, is_parameter=False, is_product=False),
    vector("ED", "experts/b_out_ED", when="experts bias", inside="F"),
    Row("D>M", "mlp/w_in_DSM", when="shared", and_one_if="gated", reads="shared expert"),
    vector("M", "mlp/b_in_SM", when="shared bias", and_one_if="gated"),
    Row("M>D", "mlp/w_out_MD", when="shared", again=""),
    vector("D", "mlp/b_out_D", when="shared bias", backward="never"))
LOG_SUMS = Kept("BHW", bytes=4, when="blocks")  # of what each query's scores add up to
EXCHANGED = (  # what heads find, and log-sums, before other devices get their tokens of it
    Kept("BWHK", when="exchanged"), Kept("BHW", bytes=4, when="exchanged"))
read = functools.partial(Kept, read=True)
READ = (  # by the products of a layer, queries, keys and values, and what heads find
    read("BTD", when="latent"), read("BWD", when="-latent"), read("BWD"),
    read("BWR", 2, when="latent"), read("BWHK", 3, when="latent"),
    read("BWHP", when="turned"), read("BWP", when="turned"),
    read("BTR", 2, when="turned"), read("BWR", 2, when="turned model"),
    read("BWHK", when="-latent"), read("BWGK", 2, when="-latent"),
    read("BWHK"), read("BWHK", when="latent bias -scores"))
SCORES = (Kept("BHWU", bytes=4, when="scores"), read("BHWU", when="scores"),
          Kept("BHW", 2, bytes=4, when="scores"))
SLOTS_KEPT = (Kept("BEZD", when="experts"), read("BEZD", when="experts"),
              Kept("BEZF", when="experts"),
              Kept("BEZF", when="experts gated"), Kept("BWM", 6, when="shared"))
HEADS = (
    Row("D>HK", "attention/w_query_DHK", when="-latent", reads="attention"),
    vector("HK", "attention/b_query_HK", when="-latent bias"),
    Row("D>GK", "attention/w_kept_DSGK", 2, when="-latent", reads="attention"),
    vector("GK", "attention/b_kept_SGK", 2, when="-latent bias"))
LATENT = (  # of queries, and of keys and values
    Row("D>R", "attention/w_latent_DSR", 2, when="latent", reads="attention"),
    vector("R", "attention/b_latent_SR", 2, when="latent bias"),
    Row("R>HK", "attention/w_query_RHK", when="latent", reads="heads/of queries"),
    vector("HK", "attention/b_query_HK", when="latent bias"),
    Row("R>P", "attention/w_turned_SRP", 2, when="turned", reads="heads/of keys"),
    vector("P", "attention/b_turned_P", when="turned bias"),
    Row("R>HP", "attention/w_turned_query_SRHP", 2, when="turned", reads="heads/of queries"),
    vector("HP", "attention/b_turned_query_HP", when="turned bias"),
    Row("R>HK", "attention/w_kept_RSHK", 2, when="latent", reads="heads/of keys"),
    vector("HK", "attention/b_kept_SHK", 2, when="latent bias"))
DECODER = Table(
    dims=TEXT | dict(G="groups|heads", R="latent", P="rotary", E="experts", C="experts",
                     A="active", Z="slots", M="shared"),
    first=(Row("V>D", "token_VD", is_product=False),),
    last=(*norm_rows("norm", when="bias"),
          Row("D>V", is_parameter=False, of="VD", useful="BTDO", reads="head")),
    inputs=IDS,
    layer=(*norm_rows("norm1", when="bias"), *norm_rows("norm2", when="bias"),
           *HEADS, *LATENT, *scores_and_values("latent"), Row("HK>D", "attention/w_out_HKD"),
           vector("D", "attention/b_out_D", when="bias"), *MLP, *EXPERTS),
    kept={
        "all": (Kept("BTD"),),
        "attention": (Kept("BTD"), Kept("BWHK"), LOG_SUMS, *EXCHANGED),
        "products": (
            Kept("BTD"), Kept("BWD"), Kept("BTR", 2, when="latent"),
            Kept("BWHK", 3, when="latent"), Kept("BWHP", when="turned"), Kept("BTP", when="turned"),
            Kept("BWHK", when="-latent"), Kept("BWGK", 2, when="-latent"),
            Kept("BWF"), Kept("BWF", when="gated"), LOG_SUMS),
        "none": (
            Kept("BTD", 6, bytes=4), Kept("BT", 4, bytes=4),  # two norms
            *READ, *SCORES, LOG_SUMS, *EXCHANGED,
            Kept("BTD", 2, bytes=1, when="dropout"), Kept("BWF", 5, when="dense"),
            read("BWF", when="dense"), *SLOTS_KEPT)},
    working={"layer": (*READ, Kept("BTD", 2, bytes=1, when="dropout")), "attention": SCORES,
             "MLP": (Kept("BWF", 3, when="dense"), Kept("BWF", when="dense gated"), *SLOTS_KEPT)},
    stacked=True)
ALL_PARTS = (  # of a model and its step, in this order
    "embedding", "layers", "layers without positions", "layers with experts", "stages", "head",
    "optimizer")
TABLES = {ViTConfig: VIT, MiniGPTConfig: MINIGPT, DecoderConfig: DECODER}


def table_of(config: Any):
    """The Table of a config's model. Raises TypeError for a config that has none."""
    if type(config) not in TABLES:
        raise TypeError(f"expected a config of {', '.join(each.__name__ for each in TABLES)}; "
                        f"found {type(config).__name__}")
    return TABLES[type(config)]


def fields_of(config: Any):
    """{name: number} of what the dims of its table name."""
    names = {name for said in table_of(config).dims.values() for word in said.split()
             for name in word.split("|")}
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
          "latent": getattr(config, "latent", 0), "dropout": getattr(config, "dropout", 0),
          "scores": not getattr(config, "by_row", False), "shared": experts and experts.shared,
          "biased": experts and experts.biased}
    return {name for name, value in on.items() if value}


def part_of(flags: Set[str]):
    """What layers with these flags are called as a part of their model, one of ALL_PARTS."""
    if "experts" in flags:
        return "layers with experts"
    return "layers" if "positions" in flags else "layers without positions"


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
