"""The decoder's benchmarks: PyTorch's decoder is the book's, and all that is timed is the same."""
import dataclasses

import jax
import numpy as np
import pytest
import torch
from decoder_by_hand import loss_and_gradients
from moved import moved

from benchmarks import (
    bench_decoder_presets, bench_decoder_remat, bench_decoder_step, bench_decoder_update,
    decoder_runs, torch_decoder
)
from benchmarks.decoder_runs import RATE, TINY, Steps, assert_same_losses, in_turns, rows_of

CONFIG, B = TINY
CONFIGS = {
    "gated": CONFIG, "groups": dataclasses.replace(CONFIG, groups=2, bias=True),
    "gelu": dataclasses.replace(CONFIG, gated=False, bias=True, layers=3)}


def parameters(config):
    """Those of a run that begins, moved, on the host."""
    return jax.device_get(moved(decoder_runs.fresh_state(config).params, 0.1))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_decoder_in_pytorch_is_the_one_by_hand(name):
    config, batch = CONFIGS[name], decoder_runs.host_batch(CONFIG, B)
    params = parameters(config)
    loss, gradients = loss_and_gradients(params, batch, config.vocabulary)
    model = torch_decoder.Decoder(config)
    torch_decoder.copy_parameters(model, params)
    logits = model(torch.from_numpy(batch["inputs"]).long())
    found = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(batch["labels"]).long().flatten())
    assert found.item() == pytest.approx(loss, rel=1e-6)
    found.backward()
    expected = torch_decoder.Decoder(config)  # its parameters are the gradients by hand
    gradients["token_VD"] = gradients["token_VD"].astype(np.float32)
    torch_decoder.copy_parameters(expected, gradients)
    wanted = dict(expected.named_parameters())
    for path, own in model.named_parameters():
        apart = (own.grad - wanted[path]).norm()
        assert apart <= 1e-5 * wanted[path].norm(), path


def test_parameters_that_the_book_does_not_have_are_named():
    model = torch_decoder.Decoder(dataclasses.replace(CONFIG, bias=True))
    with pytest.raises(ValueError, match="attention.kept.bias"):
        torch_decoder.copy_parameters(model, parameters(CONFIG))


@pytest.mark.parametrize("name", CONFIGS)
def test_three_steps_of_both_give_the_same_losses(name):
    config = CONFIGS[name]
    losses = Steps(config, B)(4)
    assert losses[0] - losses[-1] > 0.1
    params = jax.device_get(decoder_runs.fresh_state(config).params)
    run = torch_decoder.training_steps(
        config, params, *decoder_runs.host_batch(config, B).values(), RATE)
    assert_same_losses({"book": losses, "PyTorch": run(4)})


def test_other_losses_are_refused_by_name():
    with pytest.raises(AssertionError, match="PyTorch eager"):
        assert_same_losses({"book": [2.0, 1.0], "PyTorch eager": [2.0, 1.0001]})


def test_a_ratio_is_that_of_one_round_and_the_first_one_does_not_count():
    times = {"ours": [1.0, 2.0, 4.0], "theirs": [2.0, 6.0, 12.0]}
    ours, theirs = rows_of(times, "ours", "small: ", {"theirs": ["more"]})
    assert (theirs["value"], theirs["ratio"], ours["ratio"]) == (6000.0, 3.0, 1.0)
    assert theirs["name"] == "small: theirs"
    assert theirs["note"] == "3.00 times ours; rounds 2.00 to 3.00; more"
    called = []
    found = in_turns({name: lambda count, name=name: called.append((name, count))
                      for name in ("a", "b")}, rounds=2, count=3)
    assert called == [("a", 3), ("b", 3)] * 3 and [len(each) for each in found.values()] == [2, 2]


def test_what_cannot_run_here_is_said(monkeypatch):
    steps = bench_decoder_step.torch_steps

    def refused(config, rows, compiled=False):
        if not compiled:
            return steps(config, rows)

        def fails(count):
            raise RuntimeError("no working C++ compiler\nmore")

        return fails

    monkeypatch.setattr(bench_decoder_step, "torch_steps", refused)
    rows = {row["name"].partition(": ")[2]: row for row in bench_decoder_step.speeds(CONFIG, B, 1)}
    assert rows["PyTorch compiled"]["value"] is None
    assert "no working C++ compiler" in rows["PyTorch compiled"]["note"]
    assert rows[bench_decoder_step.OURS]["ratio"] == 1.0
    assert {"PyTorch eager", "this book on one device"} < rows.keys()


def test_every_update_gives_the_parameters_of_optax():
    rows = {row["name"]: row for row in bench_decoder_update.measured(CONFIG, 1)}
    assert len(rows) == 4 and rows[bench_decoder_update.OPTAX]["ratio"] == 1.0
    assert "2 leaves" in rows[bench_decoder_update.VECTOR]["note"]


def test_an_update_that_forgets_decay_is_refused(monkeypatch):
    monkeypatch.setattr(bench_decoder_update, "DECAY", 0.0)
    with pytest.raises(AssertionError):
        bench_decoder_update.contestants(CONFIG)


def test_remat_is_measured_with_its_work():
    rows = {row["name"]: row for row in bench_decoder_remat.measured(CONFIG, B, 1)}
    assert rows["all"]["work"] > rows["attention"]["work"] > rows["products"]["work"] > 1
    assert rows["none"]["work"] == rows["none"]["ratio"] == 1
    assert rows["all"]["temporaries"] < rows["none"]["temporaries"]


def test_each_preset_takes_the_steps_of_one_device():
    rows = bench_decoder_presets.measured(CONFIG, B, 1)
    assert rows[0]["name"] == decoder_runs.ONE and "0.0 MB" in rows[0]["note"]
    assert len(rows) == 1 + len(bench_decoder_presets.WAYS)
    assert all("(8, 1)" in row["name"] or "(4, 2)" in row["name"] for row in rows[1:])
