"""Train a model of this book: one script, to be copied and changed.

    python train.py                                      a small decoder, two minutes on two cores
    python train.py minigpt-tinystories --mesh data=4,model=2 --rules tensor_parallel
    python train.py jaxformer-1b --dry-run v4:2x4x4      what it would hold, send, take on 32 chips
    python -m meshbook.hosts.clusters 4 -- python train.py laptop --mesh data=8     four processes

--help lists the presets, PRESET --help all settings; `launch/` has what starts it on clusters. A
run has a folder, OUT/RUN, with checkpoints and with metrics for TensorBoard. With --run NAME it
goes on where it ended, on the same mesh or on another one. SIGTERM saves and ends; `touch
OUT/RUN/profile` traces the next three steps.
"""
from __future__ import annotations

import itertools
import math
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import helpers
import jax
import jax.numpy as jnp
import optax
import tyro
from flax import nnx
from tqdm import tqdm

from meshbook.data import images, shards, tokens
from meshbook.data.named import load_named
from meshbook.hosts import places, replicas
from meshbook.models import MiniGPT, MiniGPTConfig, ViT, ViTConfig, as_text, stream
from meshbook.models.balanced_loss import balanced, balanced_loss
from meshbook.models.decoder import Decoder, DecoderConfig
from meshbook.models.expert_layers import JAXFORMER, ExpertSizes
from meshbook.models.losses import language_loss
from meshbook.models.pipelined import pipelined
from meshbook.parallel import accumulation, context, pipeline, schedules, slots
from meshbook.profiling.on_demand import traced_on_demand
from meshbook.saving.agreement import check_same
from meshbook.saving.checkpoints import Checkpoints
from meshbook.saving.progress import goodput, read_progress
from meshbook.sharding import Sharding, axes_of, axis_sizes, make_mesh, row_groups
from meshbook.training import (
    as_it_is, clipped, create_state, decayed, fit, laid_out, loss_and_metrics, mean_metrics
)

MODELS = {ViTConfig: ViT, MiniGPTConfig: MiniGPT, DecoderConfig: Decoder}
SCHEDULES = {"gpipe": pipeline.gpipe, "1f1b": pipeline.one_f_one_b,
             "zero-bubble": slots.in_slots(schedules.zero_bubble)}


@dataclass(frozen=True)
class Config:
    """All settings of a run."""

    model: ViTConfig | MiniGPTConfig | DecoderConfig
    data: str = "grammar"  # grammar, digits, tinystories, cifar10, or a folder, such as a corpus
    mesh: str = ""  # such as data=8,stage=2,model=2; also expert, context. Default: all devices
    rules: Literal["none", "data_parallel", "tensor_parallel", "sequence_parallel",
                   "fully_sharded", "zero1", "zero2"] = "data_parallel"
    schedule: Literal["gpipe", "1f1b", "zero-bubble"] = "1f1b"  # where the mesh has stages
    microbatches: int = 1  # parts of a batch, one after the other
    batch: int = 16  # rows of all devices together
    steps: int = 500
    peak: float = 3e-3  # the learning rate after the warm-up; half a cosine leads to `final`
    warmup: int = 50
    final: float = 0.0
    decay: float = 0.05
    clip: float = 1.0  # the largest norm of a gradient
    bias_rate: float = 1e-3  # of the bias that balances: --model.experts.biased
    validate_every: int = 100
    validation_batches: int = 10
    save_every: int = 250
    compare_every: int = 50  # steps after which all replicas must have the same bits
    sample: int = 60  # tokens that are written when a checkpoint is saved
    prompt: str = "By the sea"
    seed: int = 0
    out: Path = Path("runs")
    run: str = ""  # the run's name; one that is there goes on
    wandb: str = ""  # a project of Weights & Biases
    dry_run: str = ""  # a TPU's topology, such as v5e-8 or v4:2x4x4: compile, and train nothing

    @property
    def is_text(self):
        return not isinstance(self.model, ViTConfig)


small = DecoderConfig(640, tokens=128, embed=96, hidden=256, heads=4, layers=4)
latent = replace(small, period=2, latent=32, rotary=16, gated=False, bias=True)
few = ExpertSizes(8, 2, shared=64, capacity=1.5, router="sigmoid", auxiliary=1e-4)
large = DecoderConfig.jaxformer(experts=JAXFORMER, dtype=jnp.bfloat16, remat="all", by_row=True)
PRESETS = {
    "laptop": Config(small),
    "vit-cifar": Config(ViTConfig(), "cifar10", batch=128, steps=3_500, peak=1e-3, warmup=350),
    "minigpt-tinystories": Config(MiniGPTConfig(), "tinystories", batch=256, steps=6_000,
                                  warmup=600, prompt="Once upon a time"),
    "jaxformer-laptop": Config(
        replace(latent, experts=few), mesh="data=2,stage=2,model=2", rules="tensor_parallel",
        microbatches=4, batch=32),
    "jaxformer-1b": Config(
        large, "fineweb-edu", mesh="data=8,stage=2,model=2", rules="fully_sharded",
        schedule="gpipe", microbatches=16, batch=256, steps=26_100, peak=6e-4, final=6e-5,
        warmup=5_000, validate_every=75, save_every=750),
}


def axes_of_mesh(text: str):
    """{axis: devices} of a mesh."""
    axes = {"batch": 1} | axis_sizes(text)
    if strange := axes.keys() - {"batch", "stage", "model", "expert", "context"}:
        raise ValueError(f"expected mesh axes among data, stage, model, expert, context; found "
                         f"{', '.join(sorted(strange))}")
    return axes | {"model": axes.get("model", 1)}


def batches(config: Config, split: Any, group: int, groups: int, **how: Any):
    """A Stream of a process's rows of each batch, in an order that the seed decides."""
    how |= {"process_index": group, "process_count": groups}
    if not config.is_text:
        return images.batches(split, config.batch, config.seed, **how)
    make = (tokens if isinstance(split, tokens.Tokens) else shards).batches
    return make(split, config.batch, config.model.tokens, config.seed, documents=True, **how)


def zigzagged(loss: Any):
    """The loss of a batch whose tokens are put into zigzag order first, inside the step."""
    def of_moved(params, program, batch, key=None):
        moved = context.zigzag(batch, program.mesh.shape["context"])
        return loss(params, program, moved, key)

    return of_moved


def parts(config: Config, axes: dict[str, int]):
    """What a run is made of, for create_state: the model, its rules, the optimizer, the loss."""
    rules = getattr(Sharding, config.rules)()
    if axes.get("expert", 1) > 1:
        rules = rules.also(E="expert", B=(*axes_of(rules.activations["B"]), "expert"))
    if axes.get("context", 1) > 1:
        if not isinstance(config.model, DecoderConfig):
            raise ValueError("only a decoder's attention reaches tokens of other devices: expected "
                             f"no mesh axis context, found context={axes['context']}")
        ring = context.Context("ring", zigzagged=True)  # all devices have the same work
        rules = replace(rules.also(activations={"T": "context"}), context=ring)
    staged = axes.get("stage", 1) > 1
    loss = language_loss if config.is_text else loss_and_metrics
    experts = getattr(config.model, "experts", None)
    loss = balanced_loss if experts else loss
    if axes.get("context", 1) > 1:
        loss = zigzagged(loss)
    if staged:
        rules = rules.in_stages()
        loss = pipelined(SCHEDULES[config.schedule], config.microbatches)
    elif config.microbatches > 1:
        loss = accumulation.in_microbatches(loss, config.microbatches)
    rate = optax.warmup_cosine_decay_schedule(
        0, config.peak, config.warmup, config.steps, config.final)
    adamw = optax.adamw(rate, b2=0.99, weight_decay=config.decay, mask=decayed)
    optimizer = optax.chain(clipped(config.clip), adamw)
    if experts and experts.biased:  # neither norm nor moments see the loads
        optimizer = balanced(optimizer, config.bias_rate)
    make = lambda: MODELS[type(config.model)](config.model, rules, rngs=nnx.Rngs(config.seed))
    return dict(make_model=make, optimizer=optimizer, loss=loss,
                rows=axes_of(rules.activations["B"]) or "batch")


def train(config: Config):
    """Train, with everything around it: resume, validate, save, write, trace, end when asked."""
    places.connect()
    check_same("configuration", config)
    axes = axes_of_mesh(config.mesh)
    devices = helpers.start(math.prod(axes.values()))
    if not config.mesh and (devices[0].platform != "cpu" or jax.process_count() > 1):
        axes["batch"] = len(devices)
    data, key = load_named(config.data, config.is_text), jax.random.key(config.seed)
    if config.is_text:
        config = replace(config, model=replace(config.model, vocabulary=data.encoding.n_vocab))
    mesh = make_mesh(tuple(axes.values()), tuple(axes))
    made = parts(config, axes)
    share, first = row_groups(mesh, made["rows"]), jax.process_index() == 0
    state = create_state(mesh=mesh, prepare=as_it_is if config.is_text else data.prepare, **made)
    ours = batches(config, data.train, *share)
    held = batches(config, data.validation, *share, epochs=1)
    held = list(itertools.islice(held, config.validation_batches))
    replicas.check_batch(state.program.place(held[0]), mesh, state.program.rows)
    folder = config.out / (config.run or places.started())
    count = sum(x.size for x in jax.tree.leaves(state.params))
    say = tqdm.write if first else lambda _: None
    say(f"{MODELS[type(config.model)].__name__}, {count:,} parameters on {dict(mesh.shape)} · "
        f"{data.source} · to go on: --run {folder.name}")
    with Checkpoints(folder) as checkpoints:
        state, key = checkpoints.resume(state, ours, key)
        begun, log = int(state.step), wandb_log(config, folder, first)
        save = checkpoints.on_step(ours, key, config.save_every)
        trace = traced_on_demand(folder) if first else say
        steps = itertools.count(begun + 1)
        bar = tqdm(total=config.steps, initial=begun, unit="step", disable=not first,
                   dynamic_ncols=True, mininterval=0.1 if sys.stderr.isatty() else 20)

        def on_step(state, metrics):
            step = next(steps)
            due = lambda every: step % every == 0 or step == config.steps
            trace(metrics)
            if due(config.compare_every):
                replicas.check_replicas(state, step)
            if due(config.validate_every):
                found = mean_metrics(state, held)
                found = {f"validation_{name}": value for name, value in found.items()}
                checkpoints.metrics.write(step, found)
                log(jax.tree.map(float, metrics) | found, step=step)
                bar.set_postfix({name: f"{value:.3f}" for name, value in found.items()})
            if config.is_text and config.sample and due(config.save_every):
                say(f"step {step}: {write(config, axes, state, data.encoding)}")
            bar.update()
            save(state, metrics)

        with bar:
            fit(state, itertools.islice(ours, config.steps - begun), key, on_step)
    say(str(goodput(read_progress(folder))))


def write(config: Config, axes: dict[str, int], state: Any, encoding: Any):
    """A text of the model so far; what stages and split tokens took apart is put together."""
    whole = {name: size for name, size in axes.items() if name not in ("stage", "context")}
    if whole != axes or config.rules == "sequence_parallel":
        made = parts(replace(config, rules=config.rules.replace("sequence", "tensor")), whole)
        state = laid_out(state, made["make_model"], made["rows"])
    prompt = [encoding.eot_token, *encoding.encode_ordinary(config.prompt)]
    pieces = stream(state, [prompt], config.sample, jax.random.key(config.seed),
                    temperature=0.8, stop=encoding.eot_token)
    return config.prompt + "".join(as_text(pieces, encoding))


def dry_run(config: Config):
    """Compile the step for a TPU that is not here, and say what the run would take."""
    from meshbook.costs.plans import Plan
    from meshbook.costs.step import describe
    from meshbook.costs.work import step_work
    from meshbook.planning.dry_runs import compile_run, said_of

    jax.config.update("jax_platforms", "cpu")  # libtpu would look for a TPU
    B, side, axes = config.batch, getattr(config.model, "image", 0), axes_of_mesh(config.mesh)
    if config.is_text:
        names, prepare = ("inputs", "labels", "segments", "positions"), as_it_is
        batch = dict.fromkeys(names, ((B, config.model.tokens), jnp.int32))
    else:
        batch = {"inputs": ((B, side, side, 3), jnp.uint8), "labels": ((B,), jnp.int32)}
        prepare = images.load_digits().prepare
    found = compile_run(config.dry_run, axes, batch, prepare=prepare, **parts(config, axes))
    useful = step_work(describe(config.model, Plan(), B)).useful
    print(said_of(*found, config.steps, batch["labels"][0], useful))


def wandb_log(config: Config, folder: Path, first: bool):
    """A function that sends metrics to Weights & Biases, or nothing where that is not wanted."""
    if not config.wandb or not first:
        return lambda *_, **__: None
    import wandb
    return wandb.init(project=config.wandb, dir=folder, id=folder.name, resume="allow",
                      config=asdict(config)).log


def main(arguments: list[str]):
    if not {*arguments[:1]} & {*PRESETS, "-h", "--help"}:
        arguments = ["laptop", *arguments]
    presets = tyro.extras.subcommand_type_from_defaults(PRESETS, prefix_names=False)
    config = tyro.cli(tyro.conf.AvoidSubcommands[presets], args=arguments, description=__doc__)
    dry_run(config) if config.dry_run else train(config)


if __name__ == "__main__":
    main(sys.argv[1:])
