"""Runs of small two-layer networks that went wrong: how people come to them, and what must notice.

Each fault names the proofs that catch it; the tests and chapter 4 hold that against what they do.
The programs are in meshbook.faults.wrong_programs, the right ones in
meshbook.faults.right_programs; meshbook.faults.gallery puts the proofs to them.
"""

import dataclasses
from collections.abc import Callable, Iterable

from meshbook.faults import right_programs, wrong_programs as wrong


@dataclasses.dataclass(frozen=True)
class Fault:
    """A wrong program beside the right one, and the proofs that must catch it."""

    name: str
    story: str
    caught_by: tuple
    wrong: Callable
    right: Callable = right_programs.right


BY_HAND, ACCUMULATED = right_programs.right_by_hand, right_programs.right_accumulated
FAULTS = (
    Fault("a changed spec", "w_out is split by columns, like w_in",
          ("sharded", "communicates"), wrong.changed_spec),
    Fault("an annotation without effect", "the weights have annotations, but Flax only stores them",
          ("sharded", "communicates", "divided"), wrong.idle_annotation),
    Fault("a moment that is not split",
          "the moments were created before the weights were placed on the mesh",
          ("sharded", "communicates"), wrong.whole_moment),
    Fault("a frozen weight kept whole", "every device stores all of it, and uses its own part",
          ("sharded",), wrong.whole_frozen_weight, right_programs.right_frozen),
    Fault("moved shards", "restored onto a mesh with another order of devices",
          ("sharded", "communicates"), wrong.moved_shards),
    Fault("copies that drifted", "each data-parallel group drew its own initial weights",
          ("sharded", "same"), wrong.drifting_copies, BY_HAND),
    Fault("a state that is not donated",
          "jit without donate_argnums: the old state stays beside the new",
          ("donated",), wrong.kept_state),
    Fault("a batch that is not split", "the batch goes to jit as it came from the loader",
          ("sharded", "communicates", "divided"), wrong.whole_batch),
    Fault("a loss off by 1e-3", "the sum of n losses is divided by n - 16",
          ("same",), wrong.off_by_a_thousandth),
    Fault("dropout left on", "the sharded run uses dropout, the reference does not",
          ("same",), wrong.dropout_left_on),
    Fault("check_vma=False", "gradients taken inside a shard_map whose type check is off",
          ("sharded", "same", "communicates"), wrong.unchecked_gradients, BY_HAND),
    Fault("a sum for a mean", "gradients are summed over devices (psum), but the loss is a mean",
          ("same",), wrong.sum_for_mean, BY_HAND),
    Fault("gradients four times too large",
          "Adam divides by their size, so the losses are the same",
          ("same",), wrong.scaled_gradients, right_programs.right_adam),
    Fault("gradients never summed", "each data-parallel group trains on its own examples only",
          ("sharded", "same", "communicates"), wrong.unsummed_gradients, BY_HAND),
    Fault("clipping by a local norm", "each device clips by the norm of its own shard",
          ("same", "communicates"), wrong.local_norm, right_programs.right_clipped),
    Fault("a stale order of the data", "the run was resumed one batch too late",
          ("same",), wrong.stale_order),
    Fault("an extra psum", "activations that are already complete are averaged again",
          ("communicates",), wrong.extra_psum, BY_HAND),
    Fault("a missing psum", "a partial sum is used as if it were complete",
          ("same", "communicates"), wrong.missing_psum, BY_HAND),
    Fault("an all-reduce for an all-gather", "a weight is gathered as a sum of shards and zeros",
          ("communicates",), wrong.summed_for_gathered, right_programs.right_gathered),
    Fault("an all-gather for an all-reduce",
          "weights are gathered where activations should be summed",
          ("communicates", "divided"), wrong.gathered_for_summed, BY_HAND),
    Fault("sent past the program", "targets come from a model on another mesh, by device_put",
          ("same",), wrong.sent_past_the_program),
    Fault("an all-reduce inside a loop",
          "gradient accumulation on an Auto mesh sums in every microbatch",
          ("communicates",), wrong.reduced_in_the_loop, ACCUMULATED),
    Fault("weights gathered", "sequence parallelism is requested for the residual stream only",
          ("communicates",), wrong.gathered_weights),
    Fault("chunks across devices", "a chunked loss that reshapes the batch across devices",
          ("communicates", "divided"), wrong.chunks_across_devices,
          right_programs.right_recomputed),
    Fault("microbatches across devices", "reshape(M, B // M) puts a microbatch on one device",
          ("communicates", "divided"), wrong.microbatches_across_devices,
          right_programs.right_accumulated_on_eight),
    Fault("work done again", "jax.checkpoint where memory is not scarce",
          ("divided",), wrong.computed_again, right_programs.right_chunked),
    Fault("a wrong drawing", "drawn from the intended sharding, not from the shards",
          ("drawn",), wrong.wrong_tiles),
)


def one_of_each(faults: Iterable):
    """For each set of proofs that catch some of these faults, the last of those."""
    return tuple({fault.caught_by: fault for fault in faults}.values())
