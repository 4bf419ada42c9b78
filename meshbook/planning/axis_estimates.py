"""A decoder over one more axis of the mesh, before anything is compiled: stages, experts, context.

As `meshbook.planning.estimates`, for a mesh of two axes whose second one is that of the stages of a
pipeline, of experts, or of the tokens of a row. The calculator on the site has the same in
JavaScript; a test compares the two.
"""
from collections.abc import Mapping
from typing import NamedTuple

from meshbook.hlo.collectives import Traffic
from meshbook.models.decoder import DecoderConfig
from meshbook.planning import context_costs, expert_steps, pipeline_costs
from meshbook.planning.decoder_memory import decoder_step_peak


class AxisEstimate(NamedTuple):
    """A step by formula, of one device.

    memory: bytes by what they are, on a TPU; activations with what the layer at work needs. peak:
    the most that is held at once. traffic: the collectives, with result bytes and wire bytes.
    bubble: the share of a pipeline's time in which a device has nothing to do, or None.
    """
    memory: dict
    peak: int
    traffic: Traffic
    bubble: float | None


def estimate_stages(config: DecoderConfig, mesh: Mapping[str, int], batch: int, schedule: str,
                    microbatches: int):
    """The AxisEstimate of a pipeline: mesh {axis: size} for the batch and for the stages.

    batch: rows of text of all devices; schedule: of `pipeline_costs.SCHEDULES`. Raises ValueError
    where sizes do not divide.
    """
    across, stages = mesh.values()
    moved = pipeline_costs.pipeline_step_traffic(config, mesh, batch, schedule, microbatches)
    held = pipeline_costs.pipeline_step_memory(config, batch // across, stages, schedule,
                                               microbatches)
    bubble = pipeline_costs.turns_of(schedule, stages, microbatches).bubble
    return _summed_up(mesh, held, moved, bubble)


def estimate_experts(config: DecoderConfig, mesh: Mapping[str, int], batch: int):
    """The AxisEstimate of a decoder with experts: mesh for the batch and for the experts.

    Rows are split over both axes. Raises ValueError where sizes do not divide.
    """
    across, ways = mesh.values()
    moved = expert_steps.expert_step_traffic(config, mesh, batch)
    held = expert_steps.expert_step_memory(config, batch // (across * ways), ways)
    return _summed_up(mesh, held, moved)


def estimate_context(config: DecoderConfig, mesh: Mapping[str, int], batch: int, method: str):
    """The AxisEstimate of split rows: mesh for the batch and for the context.

    method: of `context_costs.METHODS`. Raises ValueError where sizes do not divide.
    """
    across, ways = mesh.values()
    if batch % across:
        raise ValueError(f"batch={batch} does not divide over {across} devices")
    moved = context_costs.context_step_traffic(config, mesh, batch, method)
    held = context_costs.context_step_memory(config, batch // across, ways, method)
    return _summed_up(mesh, held, moved)


def _summed_up(mesh, held, moved, bubble=None):
    memory = held | {"activations": held["activations"] + held["layer"]}
    del memory["layer"]
    return AxisEstimate(memory, decoder_step_peak(held), Traffic(moved, dict(mesh)), bubble)
