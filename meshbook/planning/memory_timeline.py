"""The memory of a training step over time, by formula: what a device holds from moment to moment.

The sums are those of `meshbook.planning.costs`, taken apart by the blocks of the model. The step is
not pipelined: all blocks are on every device, and run one after the other.
"""

from dataclasses import replace
from typing import NamedTuple

from meshbook.models.minigpt import MiniGPTConfig
from meshbook.models.vit import ViTConfig
from meshbook.planning import costs

KINDS = ("parameters", "moments", "inputs", "gathered", "gradients", "activations", "logits")


class Moment(NamedTuple):
    """One moment of a step: its phase, its block from 1 where it is in one, and bytes by KINDS.

    phase: "forward", "loss", "backward" or "update". Block 0 is the embedding. In the forward pass
    this is what is held at the end of that part, in the backward pass and in the update what is
    held when it begins, but for the embedding, where it is what is held at its end.
    """

    phase: str
    block: int | None
    held: dict

    @property
    def total(self):
        """All bytes of this moment."""
        return sum(self.held.values())


def memory_timeline(
    config: ViTConfig | MiniGPTConfig, batch: int, ways: int = 1, rows: int = 1,
    checkpointed: bool = False,
):
    """The Moments of one step with Adam, in order; bytes are those of one device of a TPU.

    batch: examples on this device; ways: devices along "model"; rows: those along "batch" that
    divide the parameters too (fully sharded). checkpointed: a block keeps only what comes into it,
    and is computed again when the backward pass gets there (`models.checkpointed_vit`).
    The largest total of a step that is not checkpointed is `costs.step_peak`.
    """
    of = costs.gpt_step_memory if hasattr(config, "vocabulary") else costs.vit_step_memory
    L, step, own = config.layers, of(config, batch, ways, rows), _parts(config, ways, rows)
    # what is split along "batch" is gathered whole, in bfloat16, and stays until all gradients
    # are there
    whole = _Parts(*(2 * (of_all - of_one) * rows // max(rows - 1, 1) for of_all, of_one
                     in zip(_parts(config, ways), own, strict=True)))
    block = costs.block_activations(config, batch, ways)
    kept = costs.block_inputs(config, batch) if checkpointed else block
    always = {name: step[name] for name in ("parameters", "moments", "inputs")}

    def moment(phase, number=None, **held):
        return Moment(phase, number, {kind: (always | held).get(kind, 0) for kind in KINDS})

    forward = [moment("forward", i, gathered=whole.embed + i * whole.block, activations=i * kept)
               for i in range(L + 1)]
    loss = moment("loss", gathered=step["gathered"], activations=L * kept, logits=step["logits"])
    backward = [moment("backward", i, gathered=step["gathered"],
                       gradients=4 * (own.head + (L - i) * own.block),
                       activations=(i - 1) * kept + block) for i in range(L, 0, -1)]
    backward.append(moment("backward", 0, gathered=step["gathered"], gradients=step["gradients"]))
    return [*forward, loss, *backward, moment("update", gradients=step["gradients"])]


class _Parts(NamedTuple):
    """Parameters of what embeds the input, of one block, and of the head."""

    embed: int
    block: int
    head: int


def _parts(config, ways, rows=1):
    """The _Parts of the parameters that a device holds."""
    if hasattr(config, "vocabulary"):
        count, head = costs.gpt_parameters, costs.gpt_head(config, ways, rows)
    else:
        count, head = costs.vit_parameters, costs.vit_head(config, rows)
    one, two = (count(replace(config, layers=layers), ways, rows) for layers in (1, 2))
    return _Parts(2 * one - two - head, two - one, head)


def highest(moments: list[Moment]):
    """The first of the moments at which most is held."""
    return max(moments, key=lambda each: each.total)
