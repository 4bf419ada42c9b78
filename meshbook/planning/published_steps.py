"""Training steps on accelerators as others have published them, beside what a formula says."""
from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshbook.costs.devices import DEVICES
from meshbook.costs.machines import Machine
from meshbook.costs.plans import Plan
from meshbook.costs.step import describe
from meshbook.costs.work import step_work
from meshbook.models.decoder_config import DecoderConfig
from meshbook.planning.topologies import RESULTS


@dataclass(frozen=True)
class Published:
    """A step of `rows` rows: config, plan and machine, its seconds, GiB of one device or None.

    source: {"cite", "url", "says"} of whoever measured it.
    """

    name: str
    source: dict
    config: DecoderConfig
    plan: Plan
    machine: Machine
    rows: int
    seconds: float
    memory: float | None


def published_steps(folder: Path | str = RESULTS):
    """The published steps of results/published-steps.toml, in its order."""
    said = tomllib.loads((Path(folder) / "published-steps.toml").read_text("utf8"))
    return [_step(each, said["sources"]) for each in said["step"]]


def _step(said, sources):
    config = DecoderConfig(**said["config"] | {"dtype": np.dtype(said["config"]["dtype"])})
    plan, device = Plan(**said["plan"]), DEVICES[said["device"]]
    devices = np.prod(list(plan.sizes.values())).item()
    machine = Machine(device, tuple(said.get("torus", (devices,))))
    return Published(said["name"], sources[said["source"]], config, plan, machine, said["rows"],
                     _seconds(said, config, plan), said.get("memory"))


def _seconds(said, config, plan):
    """Seconds of a step: as they are given, by tokens a second, or by FLOPs a second of a device,
    of which attention over all pairs of tokens is a part.
    """
    if "seconds" in said:
        return said["seconds"]
    if "tokens_per_second" in said:
        return said["rows"] * config.tokens / said["tokens_per_second"]
    return step_work(describe(config, plan, said["rows"])).useful / (
        1e12 * said["tflops_per_device"])
