"""Compile training steps of the sources' models for TPUs that are not here: results/tpu.json.

    make aot                              the nine experiments
    make aot-all                          these and all others that the book reads of
    python -m benchmarks.aot v2-8 v6e-8   the cells whose names have one of these words
    python -m benchmarks.aot decoder ...  those of benchmarks.aot_decoder, into their own record;
                                          likewise pipeline, context, experts, meshes, drawn
    python -m benchmarks.aot texts        the texts of programs that a page plays through

Two processes compile at a time. What was compiled before, with the same versions, is taken from
_build/aot, so that a run that was stopped goes on where it was.
"""

import dataclasses
import json
import logging
import lzma
import multiprocessing
import os
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from tqdm import tqdm

from benchmarks import (
    aot_context, aot_decoder, aot_drawn, aot_experts, aot_meshes, aot_pipeline
)
from benchmarks.__main__ import ROOT, machine, provenance
from meshbook.models import MiniGPT, MiniGPTConfig, ViT, ViTConfig
from meshbook.models.checkpointed_vit import CheckpointedViT
from meshbook.models.earlier import CHANGES, EarlierViT
from meshbook.models.fused_loss import one_pass_cross_entropy
from meshbook.models.losses import chunked_cross_entropy, language_loss
from meshbook.models.published import PublishedViT
from meshbook.models.text_models import MASKED
from meshbook.parallel.accumulation import in_microbatches
from meshbook.planning import programs, topologies
from meshbook.sharding import Sharding
from meshbook.training import abstract_state, as_it_is, loss_and_metrics, train_step

RESULTS, CACHE = ROOT / "results" / "tpu.json", ROOT / "_build" / "aot"
OTHERS = {"decoder": aot_decoder, "pipeline": aot_pipeline, "context": aot_context,
          "experts": aot_experts, "meshes": aot_meshes, "drawn": aot_drawn}
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "libtpu")
ON_CHIP = {"float32": 512, "bfloat16": 128}  # chunks of the one-pass loss: the fastest on a v5e
SHAPES, BATCHES = ((4, 2), (8, 1), None), (128, 1024, 4096)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One program: a TPU, a mesh or None, a global batch, and what is special about it.

    undone: which of the changes of `meshbook.models.earlier` the ViT is without, or "all";
    loss: of MiniGPT, one of LOSSES.
    """

    tpu: str
    shape: tuple | None
    batch: int
    layout: str = "book"
    checkpoint: bool = False
    parts: int = 1
    embed: int = 384
    row: str = "tensor_parallel"
    model: str = "ViT"
    dtype: str = "float32"
    dropout: float = 0.1
    undone: str = "none"
    loss: str = "chunked"

    @property
    def name(self):
        """Such as "v2-8 (4, 2) 1024": what is as usual is not said."""
        said = [f"{each.name}={getattr(self, each.name)}" for each in dataclasses.fields(self)[3:]
                if getattr(self, each.name) != each.default]
        return " ".join([self.tpu, str(self.shape or "none"), str(self.batch), *said])


NOW = Cell("v5e-8", (8, 1), 1024)
BEFORE = dataclasses.replace(NOW, undone="all")
TENSOR = Cell("v5e-8", (4, 2), 1024)
SHARDED = Cell("v5e-8", (8, 1), 1024, row="fully_sharded")
DRAWN = Cell("v2-8", (8, 1), 512)  # what fills its memory, in chapter 6
TEXTS = (BEFORE, NOW, TENSOR, SHARDED, Cell("v5e-8", (8, 1), 256, model="MiniGPT"), DRAWN,
         dataclasses.replace(DRAWN, checkpoint=True),
         dataclasses.replace(DRAWN, row="fully_sharded"))


def experiments():
    """The nine on three TPUs; without a mesh also where memory is ampler (v3) and ample (v5p)."""
    for tpu in ("v2-8", "v5e-8", "v6e-8"):
        yield from (Cell(tpu, shape, batch) for shape in SHAPES for batch in BATCHES)
    for tpu in ("v3-8", "v5p"):
        yield from (Cell(tpu, None, batch) for batch in BATCHES)


def cells():
    """All that is recorded."""
    yield from experiments()
    yield from (Cell("v2-8", (4, 2), batch, layout="sources") for batch in BATCHES)
    for checkpoint, parts in ((True, 1), (False, 8), (True, 2)):
        yield Cell("v2-8", None, 4096, checkpoint=checkpoint, parts=parts)
    yield Cell("v2-8", (8, 1), 1024, embed=512)  # the memory model has not seen these
    for tpu in ("v2-8", "v5e-8", "v6e-8"):
        yield Cell(tpu, (8, 1), 512)
        yield Cell(tpu, (2, 4), 1024)
    yield Cell("v4:2x4x4", (16, 2), 4096)
    for tpu, shape, batch in (  # compiled after the memory model was made
            ("v2-8", (4, 2), 512), ("v3-8", (4, 2), 1024), ("v4:2x4x4", (8, 1), 1024),
            ("v5p", (4, 2), 1024), ("v5e-8", (8, 1), 256)):
        yield Cell(tpu, shape, batch)
    yield from (dataclasses.replace(NOW, undone=each) for each in (*CHANGES, "all"))
    yield dataclasses.replace(NOW, dropout=0.0)
    yield from (dataclasses.replace(NOW, dropout=rate, layout="sources") for rate in (0.1, 0.0))
    for loss in LOSSES:
        yield Cell("v5e-8", (8, 1), 256, model="MiniGPT", loss=loss)
        yield Cell("v5e-8", (8, 1), 256, model="MiniGPT", dtype="bfloat16", loss=loss)
    yield from (SHARDED, Cell("v5e-8", (4, 2), 1024, row="fully_sharded"))
    for shape, batch, row in (((8, 1), 64, "tensor_parallel"), ((4, 2), 64, "tensor_parallel"),
                              ((4, 2), 256, "tensor_parallel"), ((4, 2), 64, "fully_sharded")):
        yield Cell("v5e-8", shape, batch, row=row, model="MiniGPT")


def program(cell):
    """A cell as a jitted step and the shapes and layouts of its arguments, without arrays."""
    theirs = cell.layout == "sources"
    mesh = topologies.tpu_mesh(cell.tpu, cell.shape or (1, 1),
                               axis_types=AxisType.Auto if theirs else AxisType.Explicit)
    build, optimizer, loss, shapes = (gpt if cell.model == "MiniGPT" else vit)(cell)
    batch = {name: jax.ShapeDtypeStruct((cell.batch, *shape), dtype,
                                        sharding=NamedSharding(mesh, P("batch")))
             for name, (shape, dtype) in shapes.items()}
    if theirs:
        return *published(cell, mesh, optimizer), batch
    rules = getattr(Sharding, cell.row)() if cell.shape else Sharding.none()
    make = lambda: build(rules, rngs=nnx.Rngs(0))
    state = abstract_state(make, optimizer, mesh, as_it_is, loss)
    return train_step, state, batch, jax.eval_shape(lambda: jax.random.key(0))


def published(cell, mesh, optimizer):
    """(the step of the sources' ViT as they take it, its state's shapes and layouts)."""
    def make():
        config = ViTConfig(embed=cell.embed, hidden=4 * cell.embed, dropout=cell.dropout)
        model = PublishedViT(config, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)

    with jax.set_mesh(mesh):
        graph, state = nnx.split(nnx.eval_shape(make))
        layouts = nnx.get_named_sharding(state, mesh)

    @partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        model, optimizer = nnx.merge(graph, state)

        def loss(model):
            losses = optax.softmax_cross_entropy_with_integer_labels
            return losses(model(batch["inputs"]), batch["labels"]).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), value

    return step, jax.tree.map(lambda x, layout: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=layout), *map(nnx.to_pure_dict, (state, layouts)))


def vit(cell):
    """(model but for its layout and keys, optimizer, loss, {array of a batch: a row's shape})."""
    config = ViTConfig(embed=cell.embed, hidden=4 * cell.embed, dropout=cell.dropout,
                       dtype=jnp.dtype(cell.dtype))
    loss = in_microbatches(loss_and_metrics, cell.parts) if cell.parts > 1 else loss_and_metrics
    kind = CheckpointedViT if cell.checkpoint else ViT
    if cell.undone != "none":
        undone = CHANGES if cell.undone == "all" else (cell.undone,)
        kind = partial(EarlierViT, undone=undone)
    return (partial(kind, config), optax.adam(1e-3), loss,
            {"inputs": ((32, 32, 3), jnp.float32), "labels": ((), jnp.int32)})


def gpt(cell):
    """The same for MiniGPT, its gradients clipped."""
    config = MiniGPTConfig(dtype=jnp.dtype(cell.dtype))
    rows = (config.tokens,), jnp.int32
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    chunk = {"chunk": ON_CHIP[cell.dtype]} if cell.loss == "one_pass" else {}
    loss = partial(language_loss, cross_entropy=partial(LOSSES[cell.loss], **chunk))
    return partial(MiniGPT, config), optimizer, loss, {"inputs": rows, "labels": rows}


def plain_cross_entropy(hidden_BTD, w_DV, b_V, labels_BT, weight_BT, *, vocabulary, sharding):
    """Mean loss and accuracy of all logits at once; weight_BT: None."""
    s, V = sharding, len(b_V)
    w_DV = s.weight("DV", w_DV, hidden_BTD.dtype)
    logits_BTV = jnp.einsum("BTD,DV->BTV", hidden_BTD, w_DV, out_sharding=s.activation("BTV"))
    logits_BTV += jnp.where(jnp.arange(V) < vocabulary, b_V, MASKED).astype(logits_BTV.dtype)
    logits_BTV = logits_BTV.astype(jnp.float32)
    label_BTV = jax.nn.one_hot(labels_BT, V)
    loss_BT = jax.nn.logsumexp(logits_BTV, -1) - (logits_BTV * label_BTV).sum(-1)
    return loss_BT.mean(), (logits_BTV.argmax(-1) == labels_BT).mean()


LOSSES = {"chunked": chunked_cross_entropy, "plain": plain_cross_entropy,
          "one_pass": one_pass_cross_entropy}


def compiled(cell):
    """The cell's name, and the record of its compilation."""
    logging.getLogger("jax").setLevel(logging.ERROR)
    if isinstance(cell, Cell):
        return cell.name, topologies.compile_for(cell.tpu, *program(cell), cache=CACHE).record()
    found = sys.modules[type(cell).__module__].compiled(cell, CACHE)
    return cell.name, {"cell": dataclasses.asdict(cell), "program": found.record()}


def texts():
    """Compile the programs that a page plays through, without the lines of Python they come from."""
    jax.config.update("jax_traceback_in_locations_limit", 0)  # these name files of this machine
    for cell in TEXTS:
        step, *arguments = program(cell)
        text = topologies.text_for(cell.tpu, step, *arguments)
        path = programs.path_of(cell.name)
        path.write_bytes(lzma.compress(text.encode()))
        print(f"{path.relative_to(ROOT)}: {len(text):,} characters")


def chosen_by(words):
    """Cells with one of the words in their names; all for "all"; the experiments for no words."""
    return named(cells(), words) if words else list(experiments())


def named(known, words):
    """Those of the known cells that have one of the words in their names; all for "all"."""
    return [cell for cell in known
            if words == ["all"] or any(word in cell.name for word in words)]


def merged(before, done, source, known=None):
    """The record with these cells in it, {name: fields}, and where each of its cells comes from.

    before: the record as it was, or None; known: the cells of the record. While a run has not
    compiled all cells that the record has, the provenance stays that of the others, and the run
    stands under "later" with its cells.
    """
    found = (before["cells"] if before else {}) | done
    ordered = {cell.name: found[cell.name] for cell in known or cells() if cell.name in found}
    if done.keys() >= ordered.keys():
        return {"provenance": source, "cells": ordered}
    runs = [run | {"cells": [name for name in run["cells"] if name not in done]}
            for run in before.get("later", [])]
    later = [run for run in runs if run["cells"]] + [source | {"cells": list(done)}]
    return {"provenance": before["provenance"], "later": later, "cells": ordered}


def main(words):
    """Compile what the words choose, and record it beside what was recorded before."""
    if words == ["texts"]:
        return texts()
    command = " ".join(["python -m benchmarks.aot", *words])
    if words and words[0] in OTHERS:
        module = OTHERS[words[0]]
        known = list(module.cells())
        return record(module.RESULTS, known, named(known, words[1:] or ["all"]), command)
    record(RESULTS, list(cells()), chosen_by(words), command)
    if words == ["all"]:
        for each in OTHERS:
            main([each])


def record(path, known, chosen, command):
    """Compile the chosen ones of the known cells, and record them in a file."""
    if not chosen:
        sys.exit("no cell has one of these words in its name; there are\n  "
                 + "\n  ".join(cell.name for cell in known))
    before = json.loads(path.read_text()) if path.exists() else None
    source = {"machine": machine(), **provenance(command, PACKAGES)}
    os.environ["JAX_PLATFORMS"] = "cpu"  # in the processes libtpu compiles, and is no device
    spawn, done = multiprocessing.get_context("spawn"), {}
    with spawn.Pool(2, maxtasksperchild=2) as pool:  # the compiler keeps what it once took
        for pair in tqdm(pool.imap_unordered(compiled, chosen), total=len(chosen), unit="program"):
            done |= [pair]
            topologies.write_json(path, merged(before, done, source, known))
        pool.close()  # or its end is a signal, at which libtpu prints where it was
        pool.join()
    print(f"recorded in {Path(path).relative_to(ROOT)}")


if __name__ == "__main__":
    main(sys.argv[1:])
