"""Which process of a run this is, and how it joins the others: at one address of this machine."""
import pathlib
import re

import pytest
from many import many

from meshbook.hosts import places

TOGETHER = """
from meshbook.hosts import places
os.environ[places.STARTED] = f"by-process-{me}"
print("started", places.started())
jax.jit(jax.numpy.sum)(jax.make_array_from_callback((2,), jax.sharding.NamedSharding(
    jax.make_mesh((2,), "x"), jax.P("x")), lambda _: jax.numpy.ones(1)))
ours = {os.path.realpath(f"/proc/self/fd/{each}").rpartition("socket:[")[2][:-1]
        for each in os.listdir("/proc/self/fd")}
for kind in ("tcp", "tcp6"):
    for line in open(f"/proc/net/{kind}").readlines()[1:]:
        _, local, _, state, *rest = line.split()
        if state == "0A" and rest[5] in ours:
            print("listens", local.split(":")[0])
time.sleep(0.5 * me)
raise ValueError(f"as process {me} sees it")
"""


@pytest.mark.skipif(not pathlib.Path("/proc/net/tcp").exists(), reason="needs Linux's /proc")
def test_nothing_listens_on_every_interface_one_name_is_that_of_all_and_each_has_a_last_word():
    ended, said = many(2, TOGETHER, ".", devices=2)
    where = {line.split()[-1] for line in said.splitlines() if "listens" in line}
    loopback = {"0100007F", "0000000000000000FFFF00000100007F"}  # as /proc writes 127.0.0.1
    assert where and where <= loopback, said
    for process in range(2):
        assert f"[{process}] started by-process-0" in said
        assert f"[{process}] ValueError: as process {process} sees it" in said
    assert ended.codes == [1, 1] and "Traceback" not in said


SLURM = {"SLURM_JOB_ID": "4097", "SLURM_NTASKS": "4", "SLURM_PROCID": "3"}


@pytest.mark.parametrize("nodes, host", [
    ("node7", "node7"), ("node7,other", "node7"), ("node[007-009,12],other", "node007"),
    ("gpu-a[3,5]", "gpu-a3"), ("localhost", "localhost")])
def test_slurms_variables_give_a_place(nodes, host):
    assert places.place_of(SLURM | {"SLURM_STEP_NODELIST": nodes}) == places.Place(
        f"{host}:61441", 4, 3)


def test_a_slurm_step_of_fewer_tasks_than_its_job_is_a_run_of_its_own():
    """`srun --pty` on an allocation of 8 tasks runs 1, and Slurm still says SLURM_NTASKS=8."""
    job = SLURM | {"SLURM_STEP_NODELIST": "node7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}
    for own, words in ("1", "has 1 of the 8 tasks .* nobody waits for the other 7"), (
            "6", "has 6 of the 8 .* the other 2"):
        step = job | {"SLURM_STEP_NUM_TASKS": own}
        assert places.place_of(step) == places.Place("node7:61441", int(own), 0)
        assert re.search(words, places.missing_tasks(step))
    for whole in job, job | {"SLURM_STEP_NUM_TASKS": "8"}, {}:
        assert places.missing_tasks(whole) == ""
    assert places.place_of(job).count == 8


def test_without_a_cluster_there_is_no_place():
    assert places.place_of({}) is None
    assert places.place_of(SLURM) is None  # in a batch script, outside srun


@pytest.mark.parametrize("given, words", [
    (("host:80", "2", None), "MESHBOOK_COORDINATOR and the numbers .* found host:80, 2, None"),
    (("host:80", "two", "0"), "found host:80, two, 0"),
    (("host", "2", "0"), "written as host:port"),
    (("host:80", "2", "2"), "expected a process from 0 to 1, found process 2")])
def test_a_place_that_is_none_is_refused(given, words):
    names = (places.ADDRESS, places.COUNT, places.INDEX)
    with pytest.raises(ValueError, match=words):
        places.place_of({name: each for name, each in zip(names, given) if each})
