"""A mesh of devices, and the rules that say over which of its axes each dimension is split.

`meshes` makes meshes and places batches, `rules` has the sharding rules and their presets,
`gradients` says where gradients are summed.
"""

from meshbook.sharding.gradients import (
    WithOwn, extra_axes, is_pair, of_parts, opened, own_parts, reduced, shard_map_over_the_rest,
    still_reduced, summed, summed_once, varies, varying, waiting, with_parts,
)
from meshbook.sharding.meshes import (
    axes_of, axis_sizes, check_split, make_mesh, place, row_groups, whole,
)
from meshbook.sharding.rules import LETTERS, Lives, Rules, Sharding, beside, spec_of

__all__ = [
    "LETTERS", "Lives", "Rules", "Sharding", "WithOwn", "axes_of", "axis_sizes", "beside",
    "check_split", "extra_axes", "is_pair", "make_mesh", "of_parts", "opened", "own_parts", "place",
    "reduced", "row_groups", "shard_map_over_the_rest", "spec_of", "still_reduced", "summed",
    "summed_once", "varies", "varying", "waiting", "whole", "with_parts",
]
