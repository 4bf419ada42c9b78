"""One step as four compilers made it: its work and its traffic are those of the formula."""

import gzip
import importlib.util
import pathlib
import re

import jax
import pytest
from meshes import abstract_mesh

from meshbook.hlo.flops import work
from meshbook.proofs import collectives

HERE = pathlib.Path(__file__).parents[1] / "support" / "programs"
PLATFORMS = ("cpu", "cpu-new", "v2", "v5e")

# The step of tests/support/programs/make.py, by hand: L blocks of attention and an MLP.
B, T, D, F, L = 64, 64, 256, 1024, 3
BLOCK = 4 * D * D + 2 * D * F  # weights of a block
POSITION = T * D
USEFUL = 3 * L * (B * T * (8 * D * D + 4 * D * F) + 4 * B * T * T * D)
SUMS = 4 * L * (B // 4) * T * D * 4  # four partial sums a block, float32, on (4, 2)


def saved(platform, layout):
    return gzip.open(HERE / f"{platform}-{layout}.txt.gz", "rt").read()


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("layout", ("data", "tensor", "full", "scan"))
def test_work_is_the_formula_on_every_compiler(platform, layout):
    assert work(saved(platform, layout)) * 8 == USEFUL


@pytest.mark.parametrize("platform", PLATFORMS)
def test_data_parallel_moves_the_gradients_once(platform):
    moved = collectives(saved(platform, "data"), abstract_mesh(8, 1))
    assert moved == {("all-reduce", ("batch",)): (1, 4 * (L * BLOCK + POSITION + 1))}


@pytest.mark.parametrize("platform", PLATFORMS)
def test_tensor_parallel_moves_four_partial_sums_a_block(platform):
    moved = collectives(saved(platform, "tensor"), abstract_mesh(4, 2))
    assert moved == {
        ("all-reduce", ("model",)): (4 * L, SUMS),
        ("all-reduce", ("batch",)): (1, 4 * (L * BLOCK // 2 + POSITION + 1)),
    }


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_scan_over_blocks_moves_the_same_a_turn_at_a_time(platform):
    moved = collectives(saved(platform, "scan"), abstract_mesh(4, 2))
    assert moved == {  # blocks in the loop, position and loss behind it
        ("all-reduce", ("model",)): (4 * L, SUMS),
        ("all-reduce", ("batch",)): (L + 1, 4 * (L * BLOCK // 2 + POSITION + 1)),
    }


@pytest.mark.parametrize("platform", ("cpu", "cpu-new"))
def test_fully_sharded_on_cpu_gathers_every_weight_once(platform):
    moved = collectives(saved(platform, "full"), abstract_mesh(4, 2))
    assert moved == {  # no reduce-scatter: CPU reduces whole gradients and takes a slice
        ("all-reduce", ("model",)): (4 * L, SUMS),
        ("all-reduce", ("batch",)): (1, 4 * (L * BLOCK // 2 + POSITION + 1)),
        ("all-gather", ("batch",)): (4 * L, 4 * L * BLOCK // 2),
    }


@pytest.mark.parametrize("platform", ("v2", "v5e"))
def test_fully_sharded_on_tpu_gathers_bf16_and_scatters_sums(platform):
    """Float32 products run in bf16 by default on TPU, and so do the weights that are gathered.

    Of the backward pass's twelve gathers XLA takes seven from the forward pass and makes five
    again: two qkv, one attention output, two of the MLP. Two blocks' gradients are reduce-scattered
    to a quarter; the third's, with position and loss, are all-reduced in one operation.
    """
    qkv, out, mlp = 3 * D * D // 2, D * D // 2, D * F // 2  # on one device of a model pair
    again = 2 * qkv + out + 2 * mlp
    moved = collectives(saved(platform, "full"), abstract_mesh(4, 2))
    assert moved["all-reduce", ("model",)] == (4 * L, SUMS)
    assert moved["all-gather", ("batch",)] == (17, 2 * (L * BLOCK // 2 + again))
    assert moved["all-reduce", ("batch",)] == (1, 4 * (BLOCK // 2 + POSITION + 1))
    assert moved.along("batch", kind="reduce-scatter").bytes == 4 * 2 * (BLOCK // 2) // 4
    assert len(moved) == 4


def test_v5e_repeats_gathers_in_its_text_that_run_once():
    text = saved("v5e", "full")
    written = len(re.findall(r" all-gather\(", text))
    assert written > collectives(text, abstract_mesh(4, 2)).along("batch", kind="all-gather").count == 17


@pytest.mark.parametrize("platform", ("cpu", "cpu-new"))
def test_trip_counts_are_found_without_the_compilers_note(platform):
    text = saved(platform, "scan")
    without = re.sub(r'"known_trip_count":\{"n":"\d+"\}', '"nothing":{}', text)
    assert without != text and "known_trip_count" not in saved("v5e", "scan")
    assert collectives(without, abstract_mesh(4, 2)) == collectives(text, abstract_mesh(4, 2))
    assert work(without) == work(text)


def test_the_texts_can_be_made_again():
    spec = importlib.util.spec_from_file_location("make", HERE / "make.py")
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    text = make.compiled(jax.devices()[:8], "tensor")
    assert work(text) * 8 == USEFUL
    assert collectives(text, abstract_mesh(4, 2)) == collectives(saved("cpu", "tensor"), abstract_mesh(4, 2))
