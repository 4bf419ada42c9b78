"""Hold the compiler's clock against times that were published of real TPUs: results/clock.json.

The texts of the programs go into results/clock-programs.json.xz, from which a page times them anew.

    make aot && .venv-aot/bin/python -m benchmarks.clock            all programs
    .venv-aot/bin/python -m benchmarks.clock v5e attention          those with such a word

Every program of benchmarks/published.toml is compiled for its TPU. Texts of programs are kept in
_build/clock: what was compiled by the same libtpu is not compiled again.
"""

import gzip
import importlib.metadata
import json
import lzma
import os
import statistics
import sys
import tomllib

import jax
from jax.sharding import SingleDeviceSharding
from tqdm import tqdm

from benchmarks import clock_programs
from benchmarks.__main__ import ROOT, machine, provenance
from meshbook.costs.devices import DEVICES
from meshbook.hlo.wire import wire_seconds
from meshbook.planning import programs, topologies
from meshbook.profiling.estimated_runs import estimated_run

PUBLISHED, RESULTS = ROOT / "benchmarks" / "published.toml", ROOT / "results" / "clock.json"
TEXTS = ROOT / "_build" / "clock"
TOPOLOGY = {"TPU v2": "v2-8", "TPU v5e": "v5e-8", "TPU v5p": "v5p", "TPU v6e": "v6e-8",
            "TPU7x": "tpu7x:2x2x1"}


def published(what):
    """(group of the file, arguments, published seconds) of every row: "measured", "exchanged"."""
    for group in tomllib.loads(PUBLISHED.read_text("utf8"))[what]:
        for *arguments, microseconds in group["rows"]:
            yield group, arguments, microseconds / 1e6


def name_of(group, arguments):
    """A name for a program, such as "TPUv6e-syrk-2048"."""
    return "-".join([group["tpu"], group["program"], *map(str, arguments)]).replace(" ", "")


def text_of(group, arguments):
    """The HLO text of a program, compiled for one device of its TPU."""
    version = importlib.metadata.version("libtpu")
    path = TEXTS / f"{name_of(group, arguments)}-{version}.txt.gz"
    if not path.exists():
        function, shapes = getattr(clock_programs, group["program"])(*arguments)
        place = SingleDeviceSharding(topologies.topology(TOPOLOGY[group["tpu"]])[0])
        placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in shapes]
        with topologies.quiet():
            text = jax.jit(function).lower(*placed).compile().as_text()
        TEXTS.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
    return gzip.decompress(path.read_bytes()).decode()


def exchanged(group, arguments, seconds):
    """What was published of a collective, and what its links need by `wire_seconds`, in ms."""
    kind, sizes, size, ring = arguments
    found = wire_seconds(kind, sizes, (1, size), DEVICES[group["tpu"]], ring)
    return {"source": group["source"], "tpu": group["tpu"], "kind": "collective", "program": kind,
            "arguments": arguments, "published ms": 1e3 * seconds, "raw ms": None,
            "corrected ms": 1e3 * found, "basis": {"links": 1.0}}


def measured(group, arguments, seconds):
    """What was published of a program, and what the clock says of it, in ms."""
    device = DEVICES[group["tpu"]]
    found = estimated_run(text_of(group, arguments), None, device)
    return {"name": name_of(group, arguments), "source": group["source"], "tpu": group["tpu"],
            "kind": group["kind"], "program": group["program"], "arguments": arguments,
            "published ms": 1e3 * seconds, "raw ms": found.raw, "corrected ms": found.step,
            "basis": found.by_basis(),
            "memory ms": 1e3 * sum(each.cost.moved for each in found.work) / device.bandwidth}


def main(words):
    """Compile, compare, print, record."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_traceback_in_locations_limit", 0)  # no paths of this machine in texts
    chosen = [(each, row) for each, what in ((measured, "measured"), (exchanged, "exchanged"))
              for row in published(what)
              if not words or any(word in f"{row[0]}{row[1]}" for word in words)]
    rows = [each(*row) for each, row in tqdm(chosen, unit="program")]
    for each in rows:
        times = [f"{(each[key] or 0) / each['published ms']:6.2f}"
                 for key in ("raw ms", "corrected ms")]
        print(f"{each['tpu']:8} {each['kind']:20} {each['program']:18} "
              f"{each['published ms']:10.3f} ms, raw x{times[0]}, corrected x{times[1]}, "
              f"{each['arguments']}  "
              + ", ".join(f"{name} {part:.0%}" for name, part in each["basis"].items()))
    for kind in dict.fromkeys(each["kind"] for each in rows):
        own = [each["corrected ms"] / each["published ms"] for each in rows if each["kind"] == kind]
        print(f"{kind}: {len(own)}, from {min(own):.2f} to {max(own):.2f}, "
              f"median {statistics.median(own):.2f}")
    if not words:
        texts = {name_of(*row[:2]): text_of(*row[:2]) for row in published("measured")}
        programs.PUBLISHED.write_bytes(lzma.compress(json.dumps(texts).encode()))
        source = provenance("python -m benchmarks.clock", ("jax", "jaxlib", "libtpu"))
        topologies.write_json(RESULTS, {
            "provenance": {"machine": machine(), **source}, "rows": rows,
            "sources": tomllib.loads(PUBLISHED.read_text("utf8"))["sources"]})


if __name__ == "__main__":
    main(sys.argv[1:])
