"""The benchmark of an accelerator: what it does with contestants, and these, small, on the CPU."""
import dataclasses
import json

import jax
import numpy as np
import pytest

from benchmarks import accelerator, accelerator_checks, accelerator_jax, accelerator_worker
from benchmarks.accelerator_cells import cells
from benchmarks.accelerator_report import derived, device_of, targets
from benchmarks.accelerator_worker import Worker, does_not_fit
from meshbook.costs.devices import DEVICES
from meshbook.costs.plans import Plan
from meshbook.costs.step import describe
from meshbook.costs.work import step_work
from meshbook.models.fast import class_token_saving

VIT, GPT, _ = cells(tiny=True)


@dataclasses.dataclass
class FakeCell:
    names: list
    items = 128, "images"


@pytest.fixture
def rounds(monkeypatch):
    """A function that measures fake contestants, each list of names in a process of its own."""
    monkeypatch.setattr(accelerator, "ROUNDS", 3)
    workers = []

    def run(*names, seconds=60):
        workers[:] = [Worker("tests.support.fake_contestants") for _ in names]
        asked = [FakeCell(each) for each in names]
        for worker, cell in zip(workers, asked):  # each its own cell
            send = worker.send
            own = {"cell": vars(cell)}
            worker.send = lambda do, send=send, own=own, **more: send(
                do=do, **(own if do == "prepare" else more))
        return accelerator.measured(asked[0], workers, lambda: seconds)

    yield run
    for worker in workers:
        worker.end()


def test_contestants_of_all_processes_take_turns(rounds):
    found = rounds(["quick"], ["slow"])
    assert len(found["quick"]["rounds"]) == len(found["slow"]["rounds"]) == 3
    part = derived(FakeCell([]), found, DEVICES["H200"])
    quick = part["contestants"]["quick"]
    assert 0.01 < quick["step seconds"] < part["contestants"]["slow"]["step seconds"]
    assert quick["images a second"] == pytest.approx(128 / quick["step seconds"])
    assert quick["times as fast as"]["slow"] > 1.5
    assert quick["share of peak"] == pytest.approx(1e9 / quick["step seconds"] / 989e12)
    assert quick["floors"]["memory"] == 1e6 / 4.8e12


def test_what_fails_is_recorded_and_the_others_go_on(rounds):
    found = rounds(["large", "quick", "broken"])
    assert len(found["quick"]["rounds"]) == 3
    assert found["large"]["error"] == "does not fit: 29.6GiB, 7.48GiB"
    assert "this one breaks when it runs" in found["broken"]["error"]


def test_a_process_that_ends_takes_its_contestants_with_it_and_no_others(rounds):
    found = rounds(["deadly"], ["quick"])
    assert "ended with 3" in found["deadly"]["error"] and len(found["quick"]["rounds"]) == 3


def test_one_that_takes_too_long_is_left(rounds):
    found = rounds(["endless"], ["quick"], seconds=3)
    assert "no answer within 3 seconds" in found["endless"]["error"]
    assert len(found["quick"]["rounds"]) == 3


@pytest.mark.parametrize("kind, name", [
    ("NVIDIA H200", "H200"), ("NVIDIA H100 80GB HBM3", "H100"), ("TPU v4", "TPU v4"),
    ("cpu", None)])
def test_a_device_is_found_in_the_table(kind, name):
    found = device_of(kind)
    assert (found and found.name) == name


def test_messages_of_memory_give_their_numbers():
    said = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 13.17GiB."
    assert does_not_fit(RuntimeError(said)) == "does not fit: 13.17GiB"
    assert does_not_fit(ValueError("shapes do not fit")) is None


def test_the_cells_are_those_of_the_sources():
    names = [cell.name for cell in cells(tiny=False)]
    assert len(names) == 10 and "vit, batch 1,024, bfloat16" in names
    assert "gpt, batch 256, 8 blocks, float32" in names
    vit, gpt = cells(tiny=False)[:2]
    assert (vit.items, gpt.items) == ((1024, "images"), (65_536, "tokens"))
    assert (vit.config.embed, gpt.config.padded) == (384, 50_304)


@pytest.mark.parametrize("cell", [VIT, GPT], ids=lambda cell: cell.model)
def test_every_contestant_of_jax_runs_and_says_what_it_costs(cell, monkeypatch):
    monkeypatch.setattr(accelerator_worker, "SECONDS", 0.01)
    found = accelerator_jax.prepare(cell)
    assert not {name: each for name, each in found.items() if isinstance(each, Exception)}
    timers = {name: timer for name, (timer, _) in found.items()}
    before = [float(np.mean(timer.call()["loss"])) for name, timer in timers.items()
              if name != "the sources' way"]
    np.testing.assert_allclose(before, before[0], rtol=0.15)  # the same start, other dropout
    facts = {name: facts for name, (_, facts) in found.items()}
    work = step_work(describe(cell.config, Plan(), cell.batch))
    book = next(each for name, each in facts.items() if name.startswith("this book"))
    assert book["flops"] == pytest.approx(work.done, rel=1e-6)
    assert all(each["moved bytes"] > 0 and each["peak bytes"] > 0 for each in facts.values())
    if cell.model == "vit":
        less = work.useful - class_token_saving(cell.config, cell.batch)
        assert facts["fast"]["flops"] == pytest.approx(less, rel=0.01)
        assert facts["fast, 8 steps a call"]["flops"] == pytest.approx(less, rel=0.01)
    assert all(timer.warm() > 0 and timer.round() > 0 for timer in timers.values())


@pytest.mark.parametrize("model", ["vit", "gpt"])
def test_proofs_and_traces_run(model):
    assert "same training: 3 steps" in accelerator_checks.on_both(model, True)["line"]
    assert "attention in bfloat16" in accelerator_checks.fast_and_plain(model, True)["line"]
    assert len(accelerator_checks.operations(model, True)["operations"]) > 5


def test_a_wrong_fast_model_does_not_pass(monkeypatch):
    class Wrong(accelerator_checks.FastViT):
        def __call__(self, images, key=None):
            return 1.001 * super().__call__(images, key)

    monkeypatch.setattr(accelerator_checks, "FastViT", Wrong)
    with pytest.raises(accelerator_checks.ProofFailed):
        accelerator_checks.fast_and_plain("vit", True)


def test_targets_are_read_from_the_record():
    fast = {"share of peak": 0.36, "step seconds": 0.01,
            "times as fast as": {"the sources' way": 4.2}}
    record = {"cells": {"vit, batch 1,024, bfloat16": {"contestants": {"fast": fast}}}}
    found = {what: value for what, _, value in targets(record)}
    assert found["ViT, batch 1,024: share of peak"] == 0.36
    assert found["ViT, batch 1,024: times the sources' way"] == 4.2
    assert found["ViT, batch 128: ms a step"] is None


def test_without_an_accelerator_it_says_what_it_expects(monkeypatch, tmp_path):
    monkeypatch.delenv("MESHBOOK_SIZE", raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(SystemExit, match="expected an accelerator, found a CPU"):
        accelerator.main(["--folder", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def test_a_record_goes_on_where_it_stopped_only_with_the_same_code(tmp_path):
    head = {"device": "D", "size": "full", "provenance": {"commit": "abc", "versions": {}}}
    path = tmp_path / "d.json"
    accelerator.write(path, head | {"cells": {"one": 1}, "checks": {}})
    assert accelerator.start_of(path, head, again=False)["cells"] == {"one": 1}
    assert accelerator.start_of(path, head, again=True)["cells"] == {}
    other = head | {"provenance": {"commit": "abd", "versions": {}}}
    assert accelerator.start_of(path, other, again=False)["cells"] == {}
    assert json.loads(path.read_text())["cells"] == {"one": 1}
