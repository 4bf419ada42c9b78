"""Programs that a TPU's compiler made, kept as text, for pages that play them through.

`python -m benchmarks.aot texts` compiles training steps anew, `python -m benchmarks.clock` the
programs whose times were published.
"""

import json
import lzma
import re
from collections.abc import Mapping
from dataclasses import replace

from jax.sharding import AbstractMesh

from meshbook.costs.plans import Plan
from meshbook.costs.step import describe
from meshbook.models.minigpt import MiniGPTConfig
from meshbook.models.vit import ViTConfig
from meshbook.planning.topologies import RESULTS


PUBLISHED = RESULTS / "clock-programs.json.xz"


def published_programs():
    """{name: HLO text} of the programs whose times on real TPUs were published."""
    return json.loads(lzma.decompress(PUBLISHED.read_bytes()))


def path_of(name: str):
    """The file of a program by its name in the record, such as "v5e-8 (8, 1) 1024"."""
    return RESULTS / f"tpu-{re.sub('[^a-z0-9]+', '-', name.lower()).strip('-')}.txt.xz"


def recorded_program(name: str):
    """(HLO text, mesh) of a program that was kept; the mesh has no devices.

    Raises ValueError for a name under which none was kept.
    """
    path = path_of(name)
    if not path.exists():
        kept = ", ".join(sorted(each.name for each in RESULTS.glob("tpu-*.txt.xz")))
        raise ValueError(f"expected the name of a program that was kept ({kept}); found {name!r}, "
                         f"which would be {path.name}")
    sizes = re.search(r"\((\d+), (\d+)\)", name).groups()
    return lzma.decompress(path.read_bytes()).decode(), AbstractMesh(
        tuple(map(int, sizes)), ("batch", "model"))


def step_of(name: str, mesh: Mapping[str, int]):
    """The Step of a program of the ViT or of MiniGPT in the record "tpu", by its name.

    name: such as "v5e-8 (4, 2) 64 row=fully_sharded model=MiniGPT"; mesh: {axis: size}, or {}.
    None for a loss, or a type, of which the book has no table.
    """
    special = dict(re.findall(r"(\w+)=(\S+)", name))
    if {"loss", "dtype"} & special.keys():
        return None
    embed = int(special.get("embed", 384))
    config = MiniGPTConfig() if special.get("model") == "MiniGPT" else ViTConfig(
        embed=embed, hidden=4 * embed)
    if "dropout" in special:
        config = replace(config, dropout=float(special["dropout"]))
    return describe(config, Plan(
        mesh.get("batch", 1), model=mesh.get("model", 1),
        rules=special.get("row", "tensor_parallel"), microbatches=int(special.get("parts", 1)),
        remat="all" if special.get("checkpoint") == "True" else "none"),
        rows=int(re.search(r"(?:none|\)) (\d+)", name)[1]))
