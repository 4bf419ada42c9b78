"""Memory by formula: against every training step that was compiled for a TPU, and over time."""
from dataclasses import replace

import jax.numpy as jnp
import pytest

from meshbook.costs.devices import GIB
from meshbook.costs.memory import step_memory
from meshbook.costs.plans import Plan
from meshbook.costs.step import describe
from meshbook.costs.timeline import KINDS, step_peak, step_timeline
from meshbook.models import ViTConfig
from meshbook.models.decoder import DecoderConfig
from meshbook.planning.records import rows_of

SHORT = "memory ran short, and the compiler computed operations again"
APART = {  # more than a tenth off, and why
    "v5e-8 (8, 1) 64 remat=all by_row=False": "softmax goes back through more arrays of scores",
    "v5e-8 (4, 2) 64 row=sequence_parallel overlapped=True": "pieces of tokens that travel",
    "v4:2x2x2 lockstep 1F1B 8": "a tenth of 1.1 GiB", "v4:2x2x2 lockstep 1F1B 32": "the same",
    "v5e-8 context 4, model 2: zero1, ring, remat none, 16 rows of 4x1280x1024":
        "the most is there where the loss is made, before a layer goes back",
    "v4:2x2x2 model 8: fully_sharded_kept, 2 microbatches, remat attention, 64 rows of "
    "3x1536x4096": "groups of heads: scores are there once more in bfloat16",
    "v5e-8 batch 2, context 2, model 2: fully_sharded_kept, ring, 2 microbatches, remat products, "
    "8 rows of 8x1536x512": "not explained",
    "v4:2x2x2 batch 4, model 2: fully_sharded_kept, 4 microbatches, remat all, 128 rows of "
    "5x2560x2048": "slots of experts and scores at once, and a device's own part in bfloat16",
    "v5p batch 8: zero1, 4 microbatches, remat attention, 256 rows of 2x1280x2048":
        "not explained: experts with a part of the sums of gradients",
    "v2-8 none 1024": SHORT, "v5e-8 none 4096": SHORT, "v6e-8 none 4096": SHORT,
    "v3-8 none 4096": SHORT, "v2-8 none 4096 checkpoint=True parts=2": "sums of two parts",
    "v4:2x4x4 (16, 2) 4096": "half of the masks in the chip's own memory",
    "v5e-8 (8, 1) 256 model=MiniGPT loss=plain": "no table has this loss",
    "v5e-8 (8, 1) 256 model=MiniGPT dtype=bfloat16 loss=plain": "no table has this loss"}
CHUNKS = {"tpu-decoder": 2048, "tpu-context": 2048}  # tokens of a chunk of logits, 512 of others
LARGE = [(row["name"], row["step"], CHUNKS.get(row["record"], 512), row["held"])
         for row in rows_of() if (row.get("held") or 0) > GIB
         and (row["step"] or row["record"] == "tpu")]
DENSE = DecoderConfig(512, tokens=64, embed=32, hidden=64, heads=8, layers=6)


def test_nine_of_ten_programs_above_one_gib_are_within_a_tenth():
    errors = {name: step and step_peak(step, chunk=chunk) / held - 1
              for name, step, chunk, held in LARGE}
    apart = {name for name, error in errors.items() if error is None or abs(error) > 0.1}
    assert apart == APART.keys(), {name: errors.get(name) for name in apart ^ APART.keys()}
    assert len(errors) >= 190 and len(apart) <= 0.1 * len(errors)
    known = [error for error in errors.values() if error is not None]
    assert sorted(map(abs, known))[len(known) // 2] < 0.05  # half of them within a twentieth


def test_a_formula_for_another_plan_is_further_off():
    """The same programs without what their plans say: no policy, no parts, no stages."""
    def off(change):
        found = [abs(step_peak(describe(step.config, replace(step.plan, **change), step.rows,
                                   step.layout.rules if "rules" not in change else None),
                          chunk=chunk) / held - 1) > 0.1
                 for name, step, chunk, held in LARGE if step and step.table.stacked]
        return sum(found) / len(found)

    assert off({}) < 0.1
    assert off({"remat": "none"}) > 0.6 and off({"rules": "data_parallel"}) > 0.5


@pytest.mark.parametrize("plan", [Plan(rules="data_parallel"), Plan(8, rules="fully_sharded_kept"),
                                  Plan(2, stage=2, rules="data_parallel", microbatches=4)])
@pytest.mark.parametrize("remat", ["none", "all"])
def test_the_top_of_the_timeline_is_the_peak_and_each_kind_is_as_large_somewhere(plan, remat):
    step = describe(DENSE, replace(plan, remat=remat), 64)
    moments, found = step_timeline(step), step_memory(step)
    assert max(moment.total for moment in moments) == step_peak(step)
    most = {kind: max(moment.held[kind] for moment in moments) for kind in KINDS}
    assert most == {kind: getattr(found, kind) + (found.layer if kind == "activations" else 0)
                    for kind in KINDS}
    assert [moment.phase for moment in moments] == sorted(
        [moment.phase for moment in moments], key=["forward", "loss", "backward", "update"].index)


def test_tiles_are_those_of_a_tpu_and_a_gpu_has_none():
    step = describe(ViTConfig(), Plan(8, rules="data_parallel"), 512)
    with_tiles, without = (step_memory(step, tiles) for tiles in (True, False))
    assert with_tiles.activations > 1.3 * without.activations  # 65 tokens in tiles of 128
    assert with_tiles.parameters == without.parameters


def test_fused_attention_keeps_no_scores():
    config = replace(DENSE, tokens=2048, dtype=jnp.bfloat16)
    found = {kind: step_memory(describe(config, Plan(rules="data_parallel", attention=kind), 8),
                        tiles=False).activations for kind in ("scores", "rows", "fused")}
    scores = config.layers * 8 * 8 * 2048**2 * (4 + 2)
    sums = config.layers * 8 * 8 * 2048 * 4
    assert found["scores"] - found["rows"] == scores + 2 * sums
    assert found["fused"] - found["rows"] == sums


def test_what_moves_into_other_devices_is_held_there():
    whole = step_memory(describe(DENSE, Plan(rules="data_parallel"), 64))
    for plan, parts in ((Plan(8, rules="data_parallel"), 8),
                        (Plan(2, context=4, rules="data_parallel", attention="rows"), 8)):
        other = step_memory(describe(replace(DENSE, by_row=True), plan, 64), tiles=False)
        one = step_memory(describe(replace(DENSE, by_row=True), Plan(rules="data_parallel"), 64),
                   tiles=False)
        assert other.activations == one.activations // parts
        assert other.parameters == whole.parameters


def test_under_ulysses_a_device_has_the_blocks_of_its_own_heads():
    thin = replace(DENSE, hidden=8)  # so that attention holds more than the MLP
    ring, ulysses = (describe(thin, Plan(context=4, rules="data_parallel", method=method), 2)
                     for method in ("ring", "ulysses"))
    blocks = 2 * 4 * 2 * thin.heads * (thin.tokens // 4)**2  # two of float32, of all heads
    less = step_memory(ring, tiles=False).layer - step_memory(ulysses, tiles=False).layer
    assert less == blocks - blocks // 4 + 8 * ring.numbers_of("BTGK")  # and no other's gradients


def test_what_was_gathered_is_held_with_its_gradients():
    thin, ways = replace(DENSE, hidden=8, groups=4), 4
    ring, gather = (describe(thin, Plan(context=ways, rules="data_parallel", method=method), 2)
                    for method in ("ring", "gather"))
    more = step_memory(gather, tiles=False).layer - step_memory(ring, tiles=False).layer
    # keys and values with their gradients, of all, each in float32; a ring has two pairs of these
    assert more == ring.numbers_of("BTGK") * (ways * 4 * 4 - 2 * 8)


def test_a_layer_goes_back_through_its_mlp_or_its_attention():
    """What is largest counts, and not both."""
    layer = lambda **sizes: step_memory(describe(replace(DENSE, **sizes), Plan(
        rules="data_parallel", remat="all"), 8), tiles=False).layer
    wide = {hidden: layer(hidden=hidden) for hidden in (8, 16, 4096, 8192)}
    assert wide[8] == wide[16]  # scores of all tokens are more
    assert wide[8192] - wide[4096] == 4 * 4 * 8 * DENSE.tokens * 4096  # four of float32, gated
    plain = {hidden: layer(hidden=hidden, gated=False) for hidden in (4096, 8192)}
    assert plain[8192] - plain[4096] == 3 * 4 * 8 * DENSE.tokens * 4096


def test_weights_are_copied_for_narrower_products_alone():
    for rules, of_wide in (("data_parallel", 0), ("fully_sharded_kept", 1)):
        narrow, wide = (describe(replace(DENSE, dtype=dtype), Plan(8, rules=rules), 64)
                        for dtype in (jnp.bfloat16, jnp.float32))
        split = sum(each.used for each in wide.placed if each.used != each.stored)
        assert step_memory(narrow).gathered == 2 * narrow.numbers["used"]
        assert step_memory(wide).gathered == 2 * split and (split > 0) == of_wide  # on a TPU
        assert step_memory(wide, tiles=False).gathered == 4 * split


def test_what_products_read_is_kept_as_a_tpu_multiplies_it_where_a_scan_keeps_everything():
    T, D, F, B, L = 128, 128, 256, 4, 3  # whole tiles
    config = DecoderConfig(512, tokens=T, embed=D, hidden=F, heads=1, groups=1, layers=L)
    kept = lambda dtype, tiles=True, **plan: step_memory(describe(
        replace(config, dtype=dtype), Plan(rules="data_parallel", **plan), B), tiles).activations
    more = lambda **how: kept(jnp.float32, **how) - kept(jnp.bfloat16, **how)
    units = 5 * B * T * F  # around the activation of an MLP; products read a sixth array of them
    read = B * T * (2 * D + 4 * D + T + F)  # and before four products, queries, keys, values and
    # what heads find, and probabilities
    assert more(remat="none") == 2 * L * units
    assert more(remat="none", tiles=False) == 2 * L * (units + read)
    assert more(remat="none", stage=3) == 2 * 3 * (units + read)  # a layer, in each of three turns
    assert more(remat="all") == 2 * L * B * T * D


def test_ulysses_keeps_what_heads_find_before_and_after_its_exchange():
    ring, ulysses = (step_memory(describe(DENSE, Plan(
        context=4, rules="data_parallel", method=method, remat="attention"), 2), tiles=False)
        for method in ("ring", "ulysses"))
    found = 4 * 2 * DENSE.tokens // 4 * (DENSE.embed + DENSE.heads)  # and its sums of exponentials
    assert ulysses.activations - ring.activations == DENSE.layers * found


def test_sums_of_microbatches_are_there_all_the_time():
    for config in (DENSE, ViTConfig()):
        one, two = (step_timeline(describe(config, Plan(rules="data_parallel", microbatches=m), 8))
                    for m in (1, 2))
        assert one[0].held["gradients"] == 0
        assert two[0].held["gradients"] >= one[-1].held["gradients"]
        assert max(each.held["gradients"] for each in two) == 2 * one[-1].held["gradients"]
