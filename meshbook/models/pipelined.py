"""A decoder whose layers are the stages of a pipeline: a loss for training, by any schedule.

Each device along the mesh axis of the stages has a part of the vocabulary, too. For each microbatch
they look its tokens up together, before the first stage, and find loss and gradients together,
behind the last one. So embedding and head are divided like the layers.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from meshbook.models.balanced_loss import charged, check_balanced, costs_of
from meshbook.models.decoder import Decoder
from meshbook.models.layers import keys_for
from meshbook.models.losses import CHUNK, sums_and_gradients
from meshbook.models.text_models import Hidden, places
from meshbook.parallel.accumulation import in_parts, used_split, with_made_gradients
from meshbook.parallel.pipeline import Pipeline
from meshbook.sharding import (
    axes_of, is_pair, of_parts, opened, own_parts, summed, varying, with_parts
)
from meshbook.training.state import Program, check_labels, nested, numbered


def pipelined(schedule: Callable, microbatches: int, axis: str = "stage"):
    """The mean loss of a Decoder in microbatches, as language_loss has it, by way of a pipeline.

    schedule: gpipe, one_f_one_b, or what in_slots makes of a schedule; axis: the mesh axis that
    splits the layers, see Sharding.in_stages. A `loss` for meshbook.training; each microbatch draws
    a dropout of its own, as with in_microbatches. Each device adds up gradients of its own rows;
    they are summed over the devices once, after the last microbatch. With experts they are those of
    in_microbatches(balanced_loss, microbatches), and the loss is that without what layers add.
    Raises ValueError where rows do not divide, for rules that split tokens, and for weights of
    labels.
    """
    if microbatches < 1:
        raise ValueError(f"expected 1 or more microbatches; found {microbatches}")

    def mean_loss(params, program, batch, key=None):
        check_stages(program, axis)
        if key is not None:
            check_balanced(nnx.merge(program.graph, program.variables), program)
        cut = {name: in_parts(name, x, microbatches) for name, x in batch.items()}
        keys = None if key is None else jax.random.split(key, microbatches)

        def forward(params):
            whole, back = jax.vjp(partial(whole_parameters, program, params), own_parts(params))
            found, grads = in_stages(schedule, program, axis, whole, cut, keys)
            return found, of_parts(params, *back(grads))

        return with_made_gradients(lambda params: forward(params)[0], forward, params)

    return mean_loss


def check_stages(program: Program, axis: str):
    """ValueError unless the layers of a program's model can be the stages along a mesh axis."""
    model = nnx.merge(program.graph, program.variables)
    rules = model.sharding
    if rules.parameters["L"] != axis:
        raise ValueError(f"stages along {axis!r} need layers L that are split over it, as with "
                         f"Sharding.tensor_parallel().in_stages(); found {rules.parameters['L']!r}")
    rows, given = axes_of(rules.activations["B"]), axes_of(program.rows)
    if not {*rows} <= {*given}:
        raise ValueError(f"the rules split rows over {', '.join(rows)}, and batches are split over "
                         f"{', '.join(given) or 'nothing'}: expected create_state(..., "
                         f"rows={rows})")
    if axes := axes_of(rules.activations["T"]):
        raise ValueError(f"a stage needs all tokens of a row; found T split over {', '.join(axes)}")


def whole_parameters(program: Program, params: Any, own: Any):
    """Parameters as all microbatches use them, whole along the axes of rows: gathered once.

    own: each device's own parts. Gradients are summed along these axes once, too, and scattered
    where parameters are stored in parts. Experts that an axis of rows splits stay where they are.
    """
    rows, rules = {*axes_of(program.rows)}, program.model(params).sharding

    def whole(path, w):
        stored = jax.typeof(w.own if is_pair(w) else w).sharding.spec
        gone = rows - used_split(path, rules)
        kept = [tuple(axis for axis in axes_of(rule) if axis not in gone)
                for rule in stored.partitions]
        waits = rows.difference(*kept) | stored.reduced
        return opened(w, P(*(axes or None for axes in kept), reduced=waits))

    return jax.tree.map_with_path(whole, with_parts(params, own), is_leaf=is_pair)


def in_stages(schedule: Callable, program: Program, axis: str, params: Any, cut: Mapping,
              keys: jax.Array | None):
    """((loss, metrics), gradients, partial sums along the axes of rows) of all microbatches.

    params: whole along these axes; cut: a batch in microbatches; keys: one for each of them.
    """
    rows, count = axes_of(program.rows), cut["labels"].size
    specs = jax.tree.map(lambda w: P(*jax.typeof(w).sharding.spec.partitions), params)
    waits = lambda spec: tuple(axis for axis in rows if axis not in jax.tree.leaves(tuple(spec)))
    sums = jax.tree.map(lambda spec: P(*spec.partitions, unreduced={*waits(spec)}), specs)

    def local(params, cut, keys):
        params = jax.tree.map(lambda w: varying(w, (axis, *rows)), params)
        stages = DecoderStages(axis, rows, params, program, cut, keys, count)
        found, layers, others = schedule(stages, params["layers"], len(cut["labels"]))
        grads = jax.tree.map(complete, others | {"layers": layers}, specs)
        return jax.lax.psum(found, (axis, *rows)), grads

    def complete(grad, spec):
        whole = axis not in jax.tree.leaves(tuple(spec))
        return summed(grad, (axis,) if whole else (), waits(spec))

    (loss, accuracy), grads = jax.shard_map(
        local, in_specs=(specs, P(None, rows), P()), out_specs=(P(), sums),
    )(jax.tree.map(jax.reshard, params, specs), cut, keys)
    return (loss, {"loss": loss, "accuracy": accuracy}), grads


@dataclass(frozen=True)
class DecoderStages(Pipeline):
    """A decoder's layers as stages: see Pipeline.

    params: this device's layers and part of the vocabulary; cut: its rows of all microbatches,
    (m, b, T); keys: (m,), or None in evaluation; count: labels of all devices and microbatches.
    """

    params: Any
    program: Program
    cut: Mapping
    keys: jax.Array | None
    count: int

    @property
    def model(self):
        """The model, with this device's parameters."""
        return nnx.merge(self.program.graph, numbered(self.params))

    @property
    def ways(self):
        """The mesh axes that split the vocabulary."""
        return axes_of(self.model.sharding.activations["V"])

    def own(self, i: Any):
        """Keys of this device's layers for microbatch i, and what they share.

        That is which tokens see which, and the microbatch's share of what experts add to the loss.
        """
        documents = [self.cut[name][i] if name in self.cut else None
                     for name in ("segments", "positions")]
        seen = self.model.seen(self.cut["inputs"].shape[-1], *documents)
        shared = seen, jnp.where(i >= 0, 1 / len(self.cut["labels"]), 0)
        if self.keys is None:
            return None, shared
        c, (s, p) = self.model.config, self.place
        keys = keys_for(jax.random.split(self.keys[i])[1], c.layers).reshape(p, -1, c.period)
        return keys[s], shared

    def layer(self, weights: Any, x: Hidden, keys: Any, shared: tuple):
        """The layers of one period."""
        model = self.model
        layers = nnx.merge(nnx.split(model.layers)[0], numbered(weights))
        seen, share = shared
        x, loads = model.through_with_loads(layers, x, keys, *seen)
        return x if loads is None else charged(x, costs_of(layers[-1], loads), share)

    def inputs(self, i: Any):
        """Tokens (b, T) of microbatch i."""
        key = None if self.keys is None else jax.random.split(self.keys[i])[0]
        return self.program.prepare(self.cut["inputs"][i], key)

    def enter(self, i: Any):
        """Embeddings (b, T, D) of microbatch i: a sum of what all devices find in their part."""
        c, ids_bT = self.model.config, self.inputs(i)
        w_vD = self.params["token_VD"]
        at, mine = places(P(self.ways), len(w_vD), ids_bT)
        x_bTD = w_vD.at[at].get(mode="clip", wrap_negative_indices=False).astype(c.dtype)
        x_bTD = jax.lax.psum(jnp.where(mine[..., None], x_bTD, 0), self.ways)
        known_bT = (ids_bT >= 0) & (ids_bT < c.vocabulary)
        return jnp.where(known_bT[..., None], x_bTD, jnp.nan)

    def entered(self, dx_bTD: Hidden, i: Any):
        """The gradient of this device's part of the embeddings."""
        w_vD = self.params["token_VD"]
        at, mine = places(P(self.ways), len(w_vD), self.inputs(i))
        dx_bTD = jnp.where(mine[..., None], dx_bTD, 0).astype(jnp.float32)
        dw_vD = jnp.zeros_like(w_vD, jnp.float32).at[at].add(dx_bTD, mode="drop")
        return self.with_zeros(token_VD=dw_vD.astype(w_vD.dtype))

    def leave(self, y_bTD: Hidden, i: Any):
        """((loss, accuracy), dy, gradients) of microbatch i, of what the last stage found."""
        graph, _ = nnx.split(self.model.norm)
        norm = lambda w, y_bTD: nnx.merge(graph, numbered(w))(y_bTD)
        h_bTD, back = jax.vjp(norm, self.params["norm"], y_bTD)
        w_vD, labels_n = self.params["token_VD"], self.cut["labels"][i].ravel()
        weight_n = self.own_part(jnp.full_like(labels_n, 1 / self.count, jnp.float32))
        sums, (dh_nD, dw_Dv, _) = sums_and_gradients(
            self.ways, self.model.config.vocabulary, CHUNK, h_bTD.reshape(len(labels_n), -1),
            w_vD.T.astype(h_bTD.dtype), jnp.zeros_like(w_vD[:, 0]), labels_n, weight_n)
        dh_bTD = jax.lax.psum(dh_nD, self.ways).reshape(h_bTD.shape)
        dnorm, dy_bTD = back(self.own_part(dh_bTD))
        s, p = self.place
        sums, dnorm = jax.tree.map(lambda x: jnp.where(s == p - 1, x, 0), (sums, dnorm))
        return sums, dy_bTD, self.with_zeros(token_VD=dw_Dv.T.astype(w_vD.dtype), norm=dnorm)

    def with_zeros(self, **grads: Any):
        """These gradients, and zeros for the other parameters outside of the layers."""
        others = {name: jax.tree.map(jnp.zeros_like, each) for name, each in self.params.items()
                  if name != "layers"}
        return others | grads
