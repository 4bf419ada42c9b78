"""Four processes: which rows each loads, and what is said where they load others or hold others."""
import json

import pytest
from many import many

SCRIPT = """
from flips import with_flip
from jax.sharding import Mesh
from meshbook.hosts.replicas import Different, check_batch, check_replicas
from meshbook.sharding import make_mesh, place, row_groups, whole
rows = np.arange(16)

def tell(name, value):
    print(json.dumps([name, value]), flush=True)

def refusal(check, *given):
    try:
        check(*given)
    except (ValueError, Different) as error:
        return str(error)

def placed(mesh, group, groups, more=0):
    share = rows.reshape(groups, -1)[group]
    return place({"x": share, "y": 2 * share + more}, mesh)

for shape in ((8, 1), (4, 2), (2, 4), (1, 8)):
    mesh = make_mesh(shape)
    batch = placed(mesh, *row_groups(mesh))
    tell(f"shape {shape}", [*row_groups(mesh), whole(batch["x"]).tolist(),
                            refusal(check_batch, batch, mesh)])
mesh, wide = make_mesh((4, 2)), make_mesh((2, 4))
tell("all the same", refusal(check_batch, placed(mesh, 0, 4), mesh))
tell("two the same", refusal(check_batch, placed(mesh, min(me, 2), 4), mesh))
tell("by number", refusal(check_batch, placed(wide, me % 2, 2), wide))
tell("labels", refusal(check_batch, placed(wide, me // 2, 2, more=me == 3), wide))
a, b, c, d = np.array(jax.devices()).reshape(4, 2)
crossed = [[a[0], b[0]], [a[1], c[0]], [b[1], d[0]], [c[1], d[1]]]
tell("crossed", refusal(row_groups, Mesh(np.array(crossed), ("batch", "model"))))
tell("few", refusal(row_groups, Mesh(np.array([a, b]), ("batch", "model"))))
state = soak.make_state((4, 2))
tell("right", refusal(check_replicas, state, 1))
for name in ("params/w_FC", "opt_state/0/nu/w_XF"):
    wrong = with_flip(state, name, jax.devices()[6].id)
    tell(name, refusal(check_replicas, wrong, 7))
"""


@pytest.fixture(scope="module")
def told():
    """What the four processes told: {name: [value of each, in their order]}."""
    ended, said = many(4, SCRIPT, ".")
    assert ended.well, said
    found = {}
    for line in sorted(said.splitlines()):
        if (words := line.partition("] ")[2]).startswith('["'):
            name, value = json.loads(words)
            found.setdefault(name, []).append(value)
    return found


@pytest.mark.parametrize("shape, groups", [
    ((8, 1), [0, 1, 2, 3]), ((4, 2), [0, 1, 2, 3]), ((2, 4), [0, 0, 1, 1]), ((1, 8), [0] * 4)])
def test_shares_are_those_of_the_mesh_and_together_they_are_the_batch(told, shape, groups):
    found = told[f"shape {shape}"]
    assert [each[:2] for each in found] == [[group, max(groups) + 1] for group in groups]
    assert all(each[2:] == [list(range(16)), None] for each in found)


@pytest.mark.parametrize("name, words", [
    ("all the same", "processes 0, 1, 2 and 3 have loaded the same rows for different places in "
                     "the batch: each has to load its own share"),
    ("two the same", "processes 2 and 3 have loaded the same rows for different places"),
    ("by number", "the batch differs between devices 0 (process 0), 1 (process 0) and devices "
                  "2048 (process 1), 2049 (process 1)"),
    ("labels", "the batch differs between devices 4096 (process 2), 4097 (process 2) and devices "
               "6144 (process 3), 6145 (process 3)"),
])
def test_rows_that_are_not_those_of_the_share_are_refused_by_all(told, name, words):
    assert len(told[name]) == 4 and len(set(told[name])) == 1
    assert told[name][0].startswith(words), told[name]


def test_a_mesh_on_which_processes_share_a_part_of_their_rows_or_are_left_out_is_refused(told):
    assert "some processes hold partly the same" in told["crossed"][0]
    assert "has 4 devices, and 4 processes have 8: expected a mesh of all" in told["few"][0]


@pytest.mark.parametrize("name", ["params/w_FC", "opt_state/0/nu/w_XF"])
def test_every_process_finds_the_bit_that_flipped_in_one(told, name):
    assert told["right"] == [None] * 4
    assert len(set(told[name])) == 1
    assert told[name][0].startswith(f"step 7: expected replicas of the same bits; {name} differs "
                                    "on device 6144 (process 3) from devices 0 (process 0), 2048")
