"""Wire bytes: by hand, by a simulated ring that counts, and of compiled programs of every kind."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from meshbook.costs.devices import DEVICES
from meshbook.hlo.collectives import Moved, Traffic, collectives
from meshbook.hlo.wire import WIRE, wire_bytes, wire_seconds

V5E, H100 = DEVICES["TPU v5e"], DEVICES["H100"]


class Ring:
    """k devices that can only send to their right neighbours; it counts what each sends."""

    def __init__(self, ways):
        self.ways, self.sent, self.received = ways, [0] * ways, [0] * ways

    def turn(self, messages):
        """Each device sends its message to the right; returns what each receives from the left."""
        for device, message in enumerate(messages):
            if message is not None:
                self.sent[device] += message.nbytes
                self.received[(device + 1) % self.ways] += message.nbytes
        return [messages[device - 1] for device in range(self.ways)]


def ring_reduce_scatter(ring, wholes):
    """Every device has a whole array; each piece goes round once, and is added to on its way."""
    pieces = [list(np.split(whole, ring.ways)) for whole in wholes]
    for turn in range(ring.ways - 1):
        came = ring.turn([own[(at - turn - 1) % ring.ways] for at, own in enumerate(pieces)])
        for at, own in enumerate(pieces):
            own[(at - turn - 2) % ring.ways] = own[(at - turn - 2) % ring.ways] + came[at]
    return [own[at] for at, own in enumerate(pieces)]


def ring_all_gather(ring, parts):
    """Every device has a part; each part goes round once."""
    known = [{at: part} for at, part in enumerate(parts)]
    for turn in range(ring.ways - 1):
        came = ring.turn([own[(at - turn) % ring.ways] for at, own in enumerate(known)])
        for at, own in enumerate(known):
            own[(at - turn - 1) % ring.ways] = came[at]
    return [np.concatenate([own[each] for each in range(ring.ways)]) for own in known]


def ring_all_reduce(ring, wholes):
    return ring_all_gather(ring, ring_reduce_scatter(ring, wholes))


def ring_broadcast(ring, wholes):
    """The first device's array in pieces down the chain; the last one keeps it."""
    known = [list(np.split(wholes[0], ring.ways))] + [[] for _ in wholes[1:]]
    for turn in range(2 * ring.ways):
        came = ring.turn([own[turn - at] if at < ring.ways - 1 and 0 <= turn - at < len(own)
                          else None for at, own in enumerate(known)])
        for at in range(1, ring.ways):
            known[at] += [came[at]] if came[at] is not None else []
    return [np.concatenate(own) for own in known]


@pytest.mark.parametrize("ways", [2, 3, 4, 8])
@pytest.mark.parametrize("kind, run, expected", [
    ("reduce-scatter", ring_reduce_scatter, lambda x, at: np.split(x.sum(0), len(x))[at]),
    ("all-gather", ring_all_gather, lambda x, at: x.ravel()),
    ("all-reduce", ring_all_reduce, lambda x, at: x.sum(0)),
    ("collective-broadcast", ring_broadcast, lambda x, at: x[0])])
def test_a_ring_sends_what_the_formula_says(kind, run, expected, ways):
    ring = Ring(ways)
    x = np.random.default_rng(0).integers(0, 100, (ways, 6 * ways)).astype(np.float32)
    results = run(ring, list(x))
    for at, result in enumerate(results):
        np.testing.assert_array_equal(result, expected(x, at))
    wire = wire_bytes(kind, ways, results[0].nbytes)
    if kind == "collective-broadcast":  # the last sends nothing, the first gets nothing
        assert ring.sent == [wire] * (ways - 1) + [0] and ring.received == [0] + [wire] * (ways - 1)
    else:
        assert ring.sent == ring.received == [wire] * ways


@pytest.mark.parametrize("ways", [2, 4, 8])
def test_an_all_to_all_and_a_permute_send_what_the_formula_says(ways):
    pieces = np.arange(ways * ways * 6, dtype=np.float32).reshape(ways, ways, 6)
    result = pieces.swapaxes(0, 1)
    sent = [sum(pieces[at, to].nbytes for to in range(ways) if to != at) for at in range(ways)]
    assert sent == [wire_bytes("all-to-all", ways, result[0].nbytes)] * ways
    ring = Ring(ways)
    came = ring.turn(list(pieces))
    assert ring.sent == [wire_bytes("collective-permute", ways, came[0].nbytes)] * ways


@pytest.mark.parametrize("kind, by_hand", [
    ("all-reduce", 1200), ("all-gather", 600), ("reduce-scatter", 2400), ("all-to-all", 600),
    ("collective-permute", 800), ("collective-broadcast", 800)])
def test_four_devices_and_800_bytes_by_hand(kind, by_hand):
    assert wire_bytes(kind, 4, 800) == by_hand
    assert Traffic({(kind, ("model",)): Moved(5, 800)}, {"model": 4}).wire("model") == by_hand
    assert kind in ("collective-permute", "collective-broadcast") or not wire_bytes(kind, 1, 800)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    assert wire_bytes("all-reduce", 8, 800) == 1400 == (
        wire_bytes("reduce-scatter", 8, 100) + wire_bytes("all-gather", 8, 800))


MESHES = {(8, 1): ("a", "b"), (4, 2): ("a", "b"), (2, 4): ("a", "b"), (2, 2, 2): ("a", "b", "c")}
OPERATIONS = {  # on a device's piece of 32 rows of 4 numbers: 512 bytes
    "all-reduce": (lambda x, axes, ways: jax.lax.psum(x, axes),
                   lambda k: (512, 1024 * (k - 1) / k)),
    "all-gather": (lambda x, axes, ways: jax.lax.all_gather(x, axes, tiled=True),
                   lambda k: (512 * k, 512 * (k - 1))),
    "reduce-scatter": (lambda x, axes, ways: jax.lax.psum_scatter(x, axes, tiled=True),
                       lambda k: (512 // k, 512 * (k - 1) / k)),
    "all-to-all": (lambda x, axes, ways: jax.lax.all_to_all(x, axes, 0, 0, tiled=True),
                   lambda k: (512, 512 * (k - 1) / k)),
    "collective-permute": (
        lambda x, axes, ways: jax.lax.ppermute(x, axes, [(i, (i + 1) % ways) for i in range(ways)]),
        lambda k: (512, 512)),
}


def compiled(kind, shape, axes):
    """One collective along some axes of a mesh, compiled: (program, mesh, ways)."""
    names = MESHES[shape]
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))
    ways = int(np.prod([mesh.shape[axis] for axis in axes]))
    run = OPERATIONS[kind][0]
    spec = P(names)
    mapped = jax.shard_map(lambda x: run(x, axes, ways), mesh=mesh, in_specs=spec, out_specs=spec,
                           check_vma=False)
    x = jax.ShapeDtypeStruct((8 * 32, 4), jnp.float32, sharding=NamedSharding(mesh, spec))
    return jax.jit(mapped).lower(x).compile(), mesh, ways


@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize("kind", OPERATIONS)
def test_compiled_programs_of_every_kind(kind, shape):
    names = MESHES[shape]
    choices = [(name,) for name in names] + ([names[:2], names[1:]] if len(names) == 3 else [names])
    for axes in choices:
        program, mesh, ways = compiled(kind, shape, axes)
        moved = collectives(program, mesh)
        wide = tuple(axis for axis in axes if mesh.shape[axis] > 1)
        if not wide:
            assert moved == {} and moved.wire_total == 0
            continue
        result, wire = OPERATIONS[kind][1](ways)
        assert moved == {(kind, wide): (1, result)}
        assert moved.wire(*wide) == moved.wire(*wide, kind=kind) == moved.wire_total == wire
        assert f"  {result:,}" in repr(moved) and f"{wire:,.0f} |" in moved._repr_markdown_()
        assert list(moved.seconds(V5E)) == [wide]


def text(line):
    return ("HloModule test, num_partitions=8\n\nENTRY %main (p: f32[8,4]) -> f32[8,4] {\n"
            f"  %p = f32[8,4]{{1,0}} parameter(0)\n  ROOT %r = f32[8,4]{{1,0}} {line}\n}}\n")


def mesh_4_2():
    return jax.sharding.AbstractMesh((4, 2), ("batch", "model"))


def test_groups_that_no_axes_make_have_the_wire_bytes_of_their_size():
    groups = "channel_id=1, use_global_device_ids=true, replica_groups="
    pairs = collectives(text(f"all-reduce(%p), {groups}{{{{0,2}},{{4,6}},{{1,3}},{{5,7}}}}"),
                        mesh_4_2())
    assert pairs == {("all-reduce", ("?",)): (1, 128)}
    assert pairs.wire("?") == pairs.wire_total == 128 and "?" in repr(pairs)
    said = "?: no set of mesh axes makes the groups"
    assert said in repr(pairs).splitlines()[-1] and said in pairs._repr_markdown_().splitlines()[-1]
    assert "?:" not in collectives(text("negate(%p)"), mesh_4_2())._repr_markdown_()
    uneven = collectives(text(f"all-reduce(%p), {groups}{{{{0,1,2}},{{3,4,5,6,7}}}}"), mesh_4_2())
    assert repr(uneven).splitlines()[1].split() == ["all-reduce", "?", "1", "128", "?"]
    for ask in (lambda: uneven.wire("?"), lambda: uneven.wire_total, lambda: uneven.seconds(V5E)):
        with pytest.raises(ValueError, match="all-reduce along \\? are not known"):
            ask()


def test_what_nobody_knows_is_never_zero():
    with pytest.raises(ValueError, match="expected one of all-reduce.*found 'ragged-all-to-all'"):
        wire_bytes("ragged-all-to-all", 4, 800)
    for traffic in (Traffic({("ragged-all-to-all", ("model",)): Moved(1, 8)}, {"model": 2}),
                    Traffic({("all-reduce", ("model",)): Moved(1, 8)})):
        assert repr(traffic).endswith("?") and traffic.along("model") == (1, 8)
        with pytest.raises(ValueError, match="along model are not known"):
            traffic.wire("model")
    assert Traffic().wire("model") == Traffic().wire_total == 0 and Traffic().seconds(V5E) == {}


def test_seconds_on_a_torus_by_hand():
    """A link of a v5e carries 50 GB/s in each direction; a ring uses two, a line and a pair one."""
    million = Moved(1, 50_000_000)  # a link's millisecond
    ms = lambda *of, **more: wire_seconds(*of, V5E, **more) * 1e3
    assert ms("all-gather", [4], million) == pytest.approx(3 / 4 / 2)
    assert ms("all-gather", [4], million, ring=False) == pytest.approx(3 / 4)
    assert ms("all-gather", [2], million) == pytest.approx(1 / 2)
    assert ms("all-reduce", [16], million) == pytest.approx(2 * 15 / 16 / 2)
    assert ms("all-gather", [4, 4], million) == pytest.approx(15 / 16 / 4)  # two rings, four links
    assert ms("collective-permute", [4], million) == pytest.approx(1)  # to one neighbour
    # A quarter of an all-gather of the k times larger whole: Austin et al. 2025.
    whole = Moved(1, 16 * million.bytes)
    assert ms("all-to-all", [16], million) == pytest.approx(
        ms("all-gather", [16], whole) / 4, rel=0.07)
    assert ms("all-to-all", [16], million) == pytest.approx(16 / 8)
    assert ms("all-to-all", [4, 2], million) == pytest.approx(1 / 2)


def test_small_arrays_take_as_long_as_their_hops():
    small = Moved(3, 3 * 512)
    assert wire_seconds("all-gather", [8], small, V5E) == pytest.approx(3 * 4e-6)
    assert wire_seconds("all-gather", [8], small, V5E, ring=False) == pytest.approx(3 * 7e-6)
    assert wire_seconds("all-reduce", [4, 2], small, V5E) == pytest.approx(3 * 2 * 3e-6)
    assert wire_seconds("collective-permute", [8], small, V5E) == pytest.approx(3e-6)


@pytest.mark.parametrize("kind", WIRE)
def test_through_a_switch_all_links_lead_everywhere(kind):
    moved = Moved(1, 10**9)
    assert wire_seconds(kind, [4, 2], moved, H100) == wire_bytes(kind, 8, 10**9) / 450e9


def test_seconds_are_never_less_than_the_wire_bytes_over_all_links():
    for device in DEVICES.values():
        for kind in WIRE:
            for sizes in ([2], [4], [8], [4, 2], [2, 2, 2]):
                for ring in (True, False):
                    spent = wire_seconds(kind, sizes, Moved(1, 10**9), device, ring)
                    least = wire_bytes(kind, int(np.prod(sizes)), 10**9) / device.interconnect
                    assert spent >= 0.9999 * least


def test_seconds_are_told_by_axes():
    traffic = Traffic({("all-reduce", ("batch",)): Moved(1, 10**8),
                       ("all-gather", ("batch",)): Moved(1, 10**8),
                       ("all-reduce", ("model",)): Moved(1, 10**8)}, {"batch": 4, "model": 2})
    spent = traffic.seconds(V5E)
    assert spent == pytest.approx({("batch",): 2.25e-3, ("model",): 2e-3})
    assert sum(spent.values()) < sum(traffic.seconds(V5E, ring=False).values())
