"""Where every leaf of a pytree lives, as a table that is read from its shards."""

from typing import Any

from meshbook.proofs.shards import bytes_by_device, require_array
from meshbook.proofs.verdicts import leaf_count, named_leaves
from meshbook.text import markdown_table, text_table


class ShardingTable:
    """Where every leaf of a pytree lives: one row a leaf, and what one device holds in all.

    rows: (path, shape, dtype, spec, bytes on one device, devices), as text. `bytes` is the total
    of one device, the fullest, and equals the sum over its shards. Prints as an aligned table and
    shows as a table in notebooks.
    """

    header = ("leaf", "shape", "dtype", "spec", "devices", "bytes per device")

    def __init__(self, tree: Any):
        leaves = named_leaves(tree)
        self.rows = [self._row(name, leaf) for name, leaf in leaves.items()]
        self.bytes_by_device = bytes_by_device(tree)
        self.bytes = max(self.bytes_by_device.values(), default=0)
        devices = _ranges(device.id for device in self.bytes_by_device)
        self.total = (leaf_count(leaves), "", "", "", devices, f"{self.bytes:,}")

    @staticmethod
    def _row(name, leaf):
        require_array(name, leaf)
        held = max(bytes_by_device(leaf).values(), default=0)
        devices = _ranges(device.id for device in leaf.sharding.device_set)
        spec = str(getattr(leaf.sharding, "spec", "one device")).replace("PartitionSpec", "P")
        return name, str(leaf.shape), str(leaf.dtype), spec, devices, f"{held:,}"

    def __repr__(self):
        return text_table(self.header, [*self.rows, self.total], numbers=1)

    def _repr_markdown_(self):
        rows = [[f"`{row[0]}`", row[1], row[2], f"`{row[3]}`", *row[4:]] for row in self.rows]
        total = [f"**{cell}**" if cell else "" for cell in self.total]
        return markdown_table(self.header, [*rows, total], numbers=1)


def _ranges(ids):
    """Sorted numbers with runs drawn together: 0-3, 6."""
    runs = []
    for number in sorted(ids):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def sharding_table(tree: Any):
    """Make the table of where every leaf of a pytree lives, read from its shards.

    tree: any pytree of arrays. Returns a ShardingTable.
    Raises ProofFailed where a leaf is no array on devices.
    """
    return ShardingTable(tree)
