"""Which run a checkpoint belongs to: its data, model, optimizer and key, and the versions.

The mesh and the sharding rules are no part of it, since a run may go on on another mesh; nor is
the loss, since the same loss can be computed in other ways, in chunks or in microbatches.
"""
import collections
import dataclasses
import functools
import hashlib
import os
import platform
import re
import warnings
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshbook.proofs.verdicts import path_name
from meshbook.saving import manifests
from meshbook.saving.contents import encode_key
from meshbook.training import Program, TrainState

PACKAGES = "jax", "jaxlib", "flax", "optax", "numpy", "grain", "orbax-checkpoint"


class OtherRun(ValueError):
    """A checkpoint of a run with other data, another model, optimizer or key."""


def identity_of(state: TrainState, stream: Iterator, key: jax.Array):
    """What decides a run besides its arrays and its mesh, as JSON has it.

    stream: has `identity`, as order.Stream. key: the one that the run began with.
    Raises TypeError for a stream without an identity, or with one that JSON would change.
    """
    if not isinstance(getattr(stream, "identity", None), dict):
        raise TypeError("expected a stream whose `identity` is a dict, as that of tokens.batches, "
                        "images.batches or order.Stream(batches, data, seed=…); found a "
                        f"{type(stream).__name__} without one")
    manifests.check_json(stream.identity)
    return {"data": stream.identity, "model": model_of(state.program),
            "optimizer": optimizer_of(state), "prepare": plain(state.program.prepare),
            "key": encode_key(key)}


def model_of(program: Program):
    """The model's `config`; of a model without one, those of its attributes that JSON has."""
    model = nnx.merge(program.graph, program.variables)
    if hasattr(model, "config"):
        return plain(model.config)
    return {name: value for name, value in vars(model).items()
            if isinstance(value, (bool, int, float, str))}


def optimizer_of(state: TrainState):
    """The optimizer by what it does: its update's constants, counted, and SHA-256 as StableHLO.

    An optax transformation is a pair of closures, which say nothing of how they were made. The
    text is lowered for a CPU and without a mesh, so it is the same wherever the run goes on;
    other versions of jax or optax may write the same update in another way.
    """
    optimizer, bare = state.program.optimizer, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    params = jax.tree.map(bare, state.params)
    with jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ())):
        old = jax.tree.map(bare, jax.eval_shape(optimizer.init, params))
        traced = jax.jit(optimizer.update).trace(params, old, params)
        text = traced.lower(lowering_platforms=("cpu",)).as_text()
    constants = collections.Counter(
        value if value.isdecimal() else f"{float(value):g}"
        for value in re.findall(r"dense<([-+.\deE]+)>", text))
    return {"constants": dict(constants), "sha256": hashlib.sha256(text.encode()).hexdigest()}


def plain(value: Any):
    """A configuration as JSON values: dataclasses by their fields, types and functions by name."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name))
                for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, functools.partial):
        return [plain(value.func), *map(plain, value.args), plain(value.keywords)]
    try:
        return jnp.dtype(value).name
    except TypeError:
        return getattr(value, "__qualname__", type(value).__qualname__)


def versions():
    """The versions of Python and of the packages that decide a run's numbers."""
    return {"python": platform.python_version()} | {
        name: metadata.version(name) for name in PACKAGES}


def check_run(path: str | os.PathLike, manifest: Mapping[str, Any], identity: dict[str, Any]):
    """OtherRun, naming what differs, unless a checkpoint is of this run.

    Other versions are a warning: people upgrade. The optimizer can then be compared only where
    jax and optax are the same, because its fingerprint is a text that they write.
    """
    found, expected = manifest["identity"], identity
    others = differences(manifest["versions"], versions())
    if others:
        warnings.warn(f"{path} was written with other versions, so losses may differ in their "
                      f"last digits: {'; '.join(others)}", stacklevel=5)
    if any(other.startswith(("jax:", "optax:")) for other in others):
        found, expected = ({name: value for name, value in each.items() if name != "optimizer"}
                           for each in (found, expected))
    faults = differences(found, expected)
    if faults:
        more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise OtherRun(f"{path} is of another run: {'; '.join(faults[:5])}{more}. A run with other "
                       "settings needs a folder of its own; restore() gives it these arrays")


def differences(found: dict[str, Any], expected: dict[str, Any]):
    """["name: expected …, found …"] for every name of two nested dicts that differs."""
    found, expected = (
        {path_name(path): repr(value) for path, value in jax.tree.leaves_with_path(
            tree, is_leaf=lambda x: not isinstance(x, dict))} for tree in (found, expected))
    return [f"{name}: expected {expected.get(name, 'none')}, found {found.get(name, 'none')}"
            for name in sorted(found | expected) if found.get(name) != expected.get(name)]
