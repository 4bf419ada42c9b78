"""Programs that are kept: found again by another process, the same in all that a proof reads."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import collections, json, sys
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from meshbook import proofs
from meshbook.hlo.options import keep_programs
from meshbook.sharding import make_mesh

seen = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: seen.update([event.split("/")[-1]]))
jax.config.update("jax_num_cpu_devices", 8)
keep_programs(sys.argv[1])
mesh = make_mesh((4, 2))


@jax.jit
def step(x_BF, w_FD):
    with jax.named_scope(sys.argv[2]):
        y_BD = jnp.einsum("bf,fd->bd", x_BF, w_FD, out_sharding=P("batch"))
    return x_BF, jnp.tanh(y_BD)


with jax.set_mesh(mesh):
    x_BF = jax.device_put(jnp.arange(64.).reshape(8, 8) / 64, P("batch", "model"))
    w_FD = jax.device_put(jnp.arange(32.).reshape(8, 4) / 32, P("model"))
    program = step.lower(x_BF, w_FD).compile()
    hits = seen["cache_hits"]
memory = program.memory_analysis()
print(json.dumps({
    "hits": hits, "text": program.as_text(), "work": proofs.work(program),
    "moved": str(proofs.collectives(program, mesh)), "temporaries": memory.temp_size_in_bytes,
    "arguments": memory.argument_size_in_bytes, "result": program(x_BF, w_FD)[1].tolist()}))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What three processes found that keep programs in one folder; the third has another name."""
    folder = tmp_path_factory.mktemp("kept")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    found = []
    for name in "project", "project", "compare":
        done = subprocess.run(
            [sys.executable, "-c", CODE, str(folder), name], capture_output=True, text=True,
            timeout=120, env={**clean, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)})
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    return found


def test_a_second_process_finds_the_program_as_it_was(runs):
    first, second, _ = ({**run, "hits": None} for run in runs)
    assert runs[0]["hits"] < runs[1]["hits"]
    assert first == second and first["work"] and "all-reduce" in first["moved"]


def test_a_program_with_other_names_is_another_program(runs):
    assert runs[2]["hits"] == runs[1]["hits"] - 1
    assert "compare" in runs[2]["text"] and "project" not in runs[2]["text"]
    assert runs[2]["result"] == runs[0]["result"]
