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
    Fault("a changed spec", "w_out split by columns, as w_in is",
          ("sharded", "communicates"), wrong.changed_spec),
    Fault("an annotation without effect", "Flax was told to split the weights, and made a note",
          ("sharded", "communicates", "divided"), wrong.idle_annotation),
    Fault("a moment that is not split", "zeros_like of an array that was not yet on the mesh",
          ("sharded", "communicates"), wrong.whole_moment),
    Fault("a frozen weight kept whole", "cut at each use, which costs nothing but its memory",
          ("sharded",), wrong.whole_frozen_weight, right_programs.right_frozen),
    Fault("moved shards", "restored onto a mesh that counts its devices in another order",
          ("sharded", "communicates"), wrong.moved_shards),
    Fault("copies that drifted", "each row of devices drew its own weights",
          ("sharded", "same"), wrong.drifting_copies, BY_HAND),
    Fault("a state that is not donated", "jit without donate_argnums: the old state beside the new",
          ("donated",), wrong.kept_state),
    Fault("a batch that is not split", "a batch handed to jit as it came from the loader",
          ("sharded", "communicates", "divided"), wrong.whole_batch),
    Fault("a loss off by 1e-3", "a mean over n - 16 numbers for one over n",
          ("same",), wrong.off_by_a_thousandth),
    Fault("dropout left on", "the reference evaluates, the sharded run trains",
          ("same",), wrong.dropout_left_on),
    Fault("check_vma=False", "gradients taken inside shard_map, with its types switched off",
          ("sharded", "same", "communicates"), wrong.unchecked_gradients, BY_HAND),
    Fault("a sum for a mean", "psum of the gradients where the loss is a mean",
          ("same",), wrong.sum_for_mean, BY_HAND),
    Fault("gradients four times too large", "Adam divides by their size: the same losses",
          ("same",), wrong.scaled_gradients, right_programs.right_adam),
    Fault("gradients never summed", "each row of devices trains on its own rows",
          ("sharded", "same", "communicates"), wrong.unsummed_gradients, BY_HAND),
    Fault("clipping by a local norm", "each device clips by the norm of its own slice",
          ("same", "communicates"), wrong.local_norm, right_programs.right_clipped),
    Fault("a stale order of the data", "resumed one batch late",
          ("same",), wrong.stale_order),
    Fault("an extra psum", "activations that are summed already, averaged once more",
          ("communicates",), wrong.extra_psum, BY_HAND),
    Fault("a missing psum", "a partial sum taken for the whole",
          ("same", "communicates"), wrong.missing_psum, BY_HAND),
    Fault("an all-reduce for an all-gather", "a weight gathered as a sum of slices and zeros",
          ("communicates",), wrong.summed_for_gathered, right_programs.right_gathered),
    Fault("an all-gather for an all-reduce", "weights gathered, and activations not summed",
          ("communicates", "divided"), wrong.gathered_for_summed, BY_HAND),
    Fault("sent past the program", "targets from a teacher on another mesh, by device_put",
          ("same",), wrong.sent_past_the_program),
    Fault("an all-reduce inside a loop", "gradient accumulation under Auto",
          ("communicates",), wrong.reduced_in_the_loop, ACCUMULATED),
    Fault("weights gathered", "sequence parallelism pinned on the residual alone",
          ("communicates",), wrong.gathered_weights),
    Fault("chunks across devices", "a chunked loss by reshape and lax.map",
          ("communicates", "divided"), wrong.chunks_across_devices,
          right_programs.right_recomputed),
    Fault("microbatches across devices", "reshape(M, B // M), as on one device",
          ("communicates", "divided"), wrong.microbatches_across_devices,
          right_programs.right_accumulated_on_eight),
    Fault("work done again", "jax.checkpoint where memory is not short",
          ("divided",), wrong.computed_again, right_programs.right_chunked),
    Fault("a wrong drawing", "drawn from the plan, not from the shards",
          ("drawn",), wrong.wrong_tiles),
)


def one_of_each(faults: Iterable):
    """For each set of proofs that catch some of these faults, the last of those."""
    return tuple({fault.caught_by: fault for fault in faults}.values())
