"""train.py as a reader starts it: any model on any mesh, stopped and gone on with, and refusals."""
import re
from unittest import mock

import jax
import numpy as np
import pytest
import train
from meshbook import proofs
from meshbook.costs.plans import Plan
from meshbook.costs.step import describe
from meshbook.costs.work import step_work
from meshbook.saving.runs import read_metrics
from meshbook.sharding import make_mesh
from meshbook.training import as_it_is, compile_step, create_state

SHORT = ("--steps 6 --warmup 2 --save-every 3 --validate-every 3 --validation-batches 2 "
         "--batch 8 --sample 8 ")
SMALL = SHORT + "--model.embed 16 --model.hidden 32 --model.heads 4 --model.layers 2 "
TEXT = SMALL + "--data grammar --model.tokens 16 "
EXPERTS = TEXT + "--batch 16 --model.latent 8 --model.rotary 4 "


def run(command, folder, name="run"):
    """What a run printed, and its metrics as {name: [value of each step]}."""
    train.main([*command.split(), "--out", str(folder), "--run", name])
    return {name: list(values.values())
            for name, values in read_metrics(folder / name / "metrics").items()}


@pytest.mark.parametrize("command", [
    "laptop " + TEXT,
    "laptop " + TEXT + "--mesh data=4,model=2 --rules fully_sharded --microbatches 2",
    "laptop " + TEXT + "--mesh data=2,context=2",
    "jaxformer-laptop " + EXPERTS + "--mesh data=2,expert=2,model=2",
    "jaxformer-laptop " + EXPERTS + "--model.layers 4 --schedule zero-bubble",
    "vit-cifar " + SMALL + "--data digits --model.patch 16 --mesh data=2,model=2 "
    "--rules tensor_parallel",
    "minigpt-tinystories " + TEXT + "--mesh data=8",
])
def test_any_model_trains_on_any_mesh(command, tmp_path, capsys):
    metrics = run(command, tmp_path)
    assert len(metrics["loss"]) == 6 and len(metrics["validation_loss"]) == 2
    assert metrics["validation_loss"][1] < metrics["validation_loss"][0]
    said = capsys.readouterr().out
    assert ("step 6: By the sea" in said or "step 6: Once upon" in said) == ("vit" not in command)


@pytest.mark.parametrize("other, apart", [
    ("", 0),  # bit for bit
    ("--mesh data=2,stage=2,model=2 --rules fully_sharded --microbatches 2", 1e-5)])
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(
        other, apart, tmp_path, capsys, monkeypatch):
    command = "laptop " + TEXT + "--mesh data=2,model=2 --rules tensor_parallel "
    whole = run(command, tmp_path, "whole")

    def stopped_at_4(state, held):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train, "write", lambda *_: "nothing")
        patch.setattr(train, "mean_metrics", stopped_at_4)
        with pytest.raises(KeyboardInterrupt):
            run(command + "--validate-every 4", tmp_path)
    assert sorted(path.name for path in (tmp_path / "run").glob("[0-9]*")) == ["3"]
    again = run(command + other, tmp_path)
    assert again["loss"] == pytest.approx(whole["loss"], rel=apart, abs=0)
    assert again["validation_loss"][-1] == pytest.approx(
        whole["validation_loss"][-1], rel=apart, abs=0)
    assert "to go on: --run run" in capsys.readouterr().out


@pytest.mark.parametrize("flags", ["", "--microbatches 2 "])
def test_a_context_is_a_zigzag_ring_of_even_work(flags):
    """The compiled step: scores by the formula of zigzag, keys by permutes alone."""
    config = parsed("laptop " + TEXT + flags + "--mesh data=2,context=4 --model.tokens 64")
    axes, (n, T, L) = train.axes_of_mesh(config.mesh), (4, 64, config.model.layers)
    state = create_state(mesh=make_mesh(tuple(axes.values()), tuple(axes)), prepare=as_it_is,
                         **train.parts(config, axes))
    batch = state.program.place(dict.fromkeys(("inputs", "labels"), np.zeros((8, T), np.int32)))
    program = compile_step(state, batch, jax.random.key(0))
    alone = step_work(describe(config.model, Plan(), 8))  # every score, once
    a_score = 4 * config.model.embed * 8 * L
    scores = n * (2 * n + 1) * (T // (2 * n)) ** 2
    assert proofs.work(program) * 8 == (
        alone.done - 3 * a_score * T * T + 7 * a_score * scores // 2)
    kinds = {kind for kind, along in proofs.collectives(program, state.program.mesh)
             if "context" in along and kind != "all-reduce"}
    assert kinds == {"collective-permute"}


def test_another_model_than_a_decoder_has_no_context():
    config = parsed("minigpt-tinystories " + TEXT + "--mesh data=2,context=2")
    with pytest.raises(ValueError, match="expected no mesh axis context, found context=2"):
        train.parts(config, train.axes_of_mesh(config.mesh))


def parsed(command):
    """The Config of a command line."""
    with mock.patch.object(train, "train", side_effect=lambda config: found.append(config)):
        found = []
        train.main(command.split())
    return found[0]


def test_a_bias_balances_and_ruins_nothing(tmp_path):
    """As a reader asks for it: --model.experts.biased, beside the same run without."""
    command = "jaxformer-laptop " + EXPERTS.replace("--steps 6", "--steps 40").replace(
        "--validate-every 3", "--validate-every 40") + "--mesh data=1 --peak 1e-2 --sample 0 "
    plain = run(command, tmp_path, "plain")
    biased = run(command + "--model.experts.biased --bias-rate 0.01", tmp_path, "biased")
    last = lambda metrics, name: metrics[f"validation_{name}"][-1]
    assert last(biased, "balance") < last(plain, "balance")
    assert last(biased, "dropped") < last(plain, "dropped")
    assert last(biased, "loss") < last(plain, "loss") + 0.1


def test_steps_are_traced_when_somebody_asks(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").touch()
    run("laptop " + TEXT, tmp_path)
    assert not (tmp_path / "run" / "profile").exists()
    assert list((tmp_path / "run" / "profiles").glob("**/*.xplane.pb"))


@pytest.mark.parametrize("flags, said", [
    ("--mesh data=4,data=2", "each once, such as data=4,model=2; found 'data=4,data=2'"),
    ("--mesh data", "found 'data', and in it 'data'"),
    ("--mesh data=0", "found 'data=0'"),
    ("--mesh rows=2", "expected mesh axes among data, stage, model, expert, context; found rows"),
    ("--data digits", "--data digits is not for this model: expected a folder, or one of gramm"),
    ("--mesh data=3", "does not divide over mesh axis"),
    ("--mesh model=8 --rules tensor_parallel", "does not divide over mesh axis 'model'"),
    ("--mesh context=3", "expected a multiple of 6 tokens, found 16"),
    ("--data nowhere", "expected GPT-2's vocab.bpe there"),
])
def test_what_cannot_be_is_refused_in_a_sentence(flags, said, tmp_path):
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(said)):
        run("laptop " + TEXT.replace("--data grammar ", "") + flags, tmp_path)
