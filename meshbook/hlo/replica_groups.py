"""Which devices talk to one another: `replica_groups` of an HLO text, in its three spellings.

They are `{{0,1},{2,3}}`, `[4,2]<=[8]` (an iota, maybe transposed) and `mesh['x'=4,'y'=2] {'x'}`.

Source: openxla/xla, `xla/hlo/ir/mesh_and_axis.cc` (the third spelling).
"""

import re

import numpy as np

INTS = re.compile(r"-?\d+")


def replica_groups(text: str):
    """Read replica_groups in any of its spellings: a list of groups of device numbers.

    >>> replica_groups("[2,4]<=[4,2]T(1,0)")
    [[0, 2, 4, 6], [1, 3, 5, 7]]
    """
    if text.startswith("mesh["):
        return _mesh_groups(text)
    if "<=" in text:
        return _iota(text).tolist()
    groups = re.findall(r"{([^{}]*\d[^{}]*)}", text)
    return [[int(each) for each in INTS.findall(group)] for group in groups]


def _iota(text):
    """`[shape]<=[extents]T(order)`: count through the extents, transpose, reshape."""
    shape, extents, order = re.match(r"\[([\d,]*)\]<=\[([\d,]*)\](?:T\(([\d,]*)\))?", text).groups()
    numbers = lambda part: [int(each) for each in part.split(",")]
    counted = np.arange(np.prod(numbers(extents))).reshape(numbers(extents))
    return counted.transpose(numbers(order) if order else None).reshape(numbers(shape))


def _mesh_groups(text):
    """`mesh['x'=4,'y'=2] {'x'}`, with device_ids=(...) where the mesh is not in order."""
    axes, devices, chosen = re.fullmatch(r"mesh\[(.*?)\](.*?)\s*\{([^{}]*)\}", text).groups()
    sizes = {name: int(size) for name, size in re.findall(r"'?([^',=]+)'?=(\d+)", axes)}
    ids = np.arange(np.prod(list(sizes.values())))
    turned = re.search(r"(\[[\d,]+\])T(\([\d,]+\))", devices)
    if "<=" in devices:
        ids = _iota(devices[devices.index("["):])
    elif turned:  # ([4,2]T(1,0)): all devices, counted through the extents, transposed
        ids = _iota(f"[{ids.size}]<={turned[1]}T{turned[2]}")
    elif INTS.search(devices):
        ids = np.array([int(each) for each in INTS.findall(devices)])
    extents, picked = [], []
    for name, size in sizes.items():  # 'x':(2)2 is the part of x behind its first factor 2
        parts = re.findall(rf"'?{re.escape(name)}'?(?::\((\d+)\)(\d+))?(?=,|$)", chosen)
        before, width = (int(each) for each in parts[0]) if parts and parts[0][1] else (1, size)
        picked += [len(extents) + 1] if parts else []
        extents += [before, width, size // before // width]
    rest = [at for at in range(len(extents)) if at not in picked]
    width = np.prod([extents[at] for at in picked])
    return ids.reshape(extents).transpose(rest + picked).reshape(-1, width).tolist()
