"""The reader of compiled programs, on texts of four compilers and on single constructs."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P
from meshes import abstract_mesh

from meshbook.hlo import module
from meshbook.hlo.flops import work
from meshbook.hlo.replica_groups import replica_groups
from meshbook.proofs import collectives


@pytest.mark.parametrize("dtype, size", [("pred", 3), ("s4", 2), ("bf16", 6), ("f8e4m3fn", 3)])
def test_bits_fill_whole_bytes(dtype, size):
    assert module.Shape(dtype, (3,)).bytes == size


def test_groups_in_every_spelling():
    assert replica_groups("{{0,1},{2,3}}") == [[0, 1], [2, 3]]
    assert replica_groups("{}") == replica_groups("{{}}") == []
    assert replica_groups("[2,2]<=[4]") == [[0, 1], [2, 3]]
    assert replica_groups("[2,4]<=[4,2]T(1,0)") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert replica_groups("mesh['a'=4,'b'=2] {'a'}") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert replica_groups("mesh['a'=2,'b'=2,'c'=2] {'a','c'}") == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert replica_groups("mesh['a'=4,'b'=2] {'a':(2)2}") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    turned = replica_groups("mesh['a'=2,'b'=2]device_ids=([2,2]<=[2,2]T(1,0)) {'a'}")
    assert turned == [[0, 1], [2, 3]]
    assert replica_groups("mesh['a'=2,'b'=2]device_ids=(0,3,1,2) {'b'}") == [[0, 3], [1, 2]]


def test_the_order_of_a_meshs_devices_belongs_to_its_groups():
    text = ("HloModule m, num_partitions=4\n\nENTRY %main (p: f32[4]) -> f32[4] {\n"
            "  %p = f32[4] parameter(0)\n  ROOT %sum = f32[4] all-reduce(%p), channel_id=1, "
            "replica_groups=mesh['a'=2,'b'=2], device_ids=(0,3,1,2) {'b'}, to_apply=%add\n}\n")
    found = module.parse(text).computations["main"]["sum"].attributes
    assert replica_groups(found["replica_groups"]) == [[0, 3], [1, 2]]
    assert found["to_apply"] == "%add"


HEADER = "HloModule test, num_partitions=8\n\nENTRY %main (p: f32[8,4]) -> f32[8,4] {\n"
ALL = "replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true"


def moved_by(*lines, header=HEADER, mesh=None):
    body = ["  %p = f32[8,4]{1,0} parameter(0)", *(f"  {line}" for line in lines)]
    return dict(collectives(header + "\n".join(body) + "\n}\n", mesh or abstract_mesh(4, 2)))


def test_starts_and_dones_are_one_and_count_the_result():
    both = ("batch", "model")
    pair = "(f32[8,4]{1,0}, f32[64,4]{1,0})"
    assert moved_by(
        f"%s = {pair} all-gather-start(%p), channel_id=1, {ALL}, dimensions={{0}}",
        "ROOT %d = f32[64,4]{1,0} all-gather-done(%s)",
    ) == {("all-gather", both): (1, 64 * 4 * 4)}
    tuples = "((f32[8,4]{1,0}, bf16[8]{0}), (f32[64,4]{1,0}, /*index=1*/bf16[64]{0}), u32[])"
    assert moved_by(f"ROOT %s = {tuples} all-gather-start(%p, %p), channel_id=1, {ALL}") == {
        ("all-gather", both): (1, 64 * 4 * 4 + 128)}
    assert moved_by(
        f"%s = (f32[8,4]{{1,0}}, f32[2]{{0}}) all-reduce-start(%p, %p), channel_id=1, {ALL}",
        "ROOT %d = (f32[8,4]{1,0}, f32[2]{0}) all-reduce-done(%s)",
    ) == {("all-reduce", both): (1, 8 * 4 * 4 + 8)}
    ring = "source_target_pairs={{0,2},{2,4},{4,6},{6,0},{1,3},{3,5},{5,7},{7,1}}"
    assert moved_by(
        f"%s = (f32[8,4]{{1,0}}, f32[8,4]{{1,0}}, u32[]) collective-permute-start(%p), {ring}",
        "ROOT %d = f32[8,4]{1,0} collective-permute-done(%s)",
    ) == {("collective-permute", ("batch",)): (1, 128)}


def test_a_wrapped_asynchronous_collective_is_counted_once():
    header = (
        "HloModule test, num_partitions=8\n\n%wrapped (q: f32[8,4]) -> f32[1,4] {\n"
        "  %q = f32[8,4]{1,0} parameter(0)\n"
        f"  ROOT %r = f32[1,4]{{1,0}} reduce-scatter(%q), channel_id=1, {ALL}, dimensions={{0}}, "
        "to_apply=%add\n}\n\n" + HEADER.split("\n\n")[1])
    assert moved_by(
        "%s = ((f32[8,4]), f32[1,4], u32[]) async-start(%p), calls=%wrapped",
        "%u = ((f32[8,4]), f32[1,4], u32[]) async-update(%s), calls=%wrapped",
        "ROOT %d = f32[1,4]{1,0} async-done(%u), calls=%wrapped", header=header,
    ) == {("reduce-scatter", ("batch", "model")): (1, 16)}


def test_strings_brackets_and_comments_do_not_mislead():
    assert moved_by(
        '%c = f32[8,4]{1,0:T(8,128)(2,1)S(1)} custom-call(%p), custom_call_target="Sharding", '
        'metadata={op_name="jit(f)/all-reduce(x), {{(" stack_frame_id=3}, '
        'backend_config={"a":{"b":"}} all-gather(%p) \\" {"}}',
        "%k = f32[2,2]{1,0} constant({ { 1, 2 },\n { 3, 4 } })",
        f"ROOT %r = (f32[8,4]{{1,0}}, /*index=1*/f32[]) all-reduce(%c, /*index=1*/%p), {ALL}, "
        "channel_id=7, to_apply=%add",
    ) == {("all-reduce", ("batch", "model")): (1, 132)}


KERNEL = ('%k = f32[8,4]{1,0} custom-call(%p), custom_call_target="tpu_custom_call", '
          'frontend_attributes={kernel_metadata={\n')


@pytest.mark.parametrize("lines", [
    KERNEL + '"xprof_metadata":"{\\"block_q\\": 128}"\n}}, metadata={op_name="a"}, backend_config={"x":[]}',
    KERNEL + '"one":{\n}\n},"two":{"a":"}"\n}\n}',  # a line that is nothing else
    KERNEL + '"text":"ends\n}\n} ENTRY %other () -> f32[] {\n" }}',  # within a string
    KERNEL + '"text":"http://a {\n b // }\n /* {" }}',
    KERNEL + '}}  // a comment with "} and {{',
    '%k = f32[8,4]{1,0} negate(%p), metadata={op_name="http://a}" source_file="b{"}  // {',
    '%k = f32[8,4]{1,0} negate(%p), metadata={op_name="one\u2028%k} = f32[] two\x0c}"}',
])
def test_only_the_bracket_of_a_computation_ends_it(lines):
    """MaxText's programs for TPUs have attributes of several lines, of which one begins with }."""
    more = f"ROOT %r = f32[8,4]{{1,0}} all-reduce(%k), channel_id=1, {ALL}, to_apply=%add"
    expected = {("all-reduce", ("batch", "model")): (1, 128)}
    assert moved_by(lines, more) == expected
    for around in ("%s\n", "// RUN: hlo-opt %%s\n\n%s", "%s\n// the end }"):
        text = around % f"{HEADER}  %p = f32[8,4]{{1,0}} parameter(0)\n  {lines}\n  {more}\n}}"
        assert collectives(text, abstract_mesh(4, 2)) == expected
        assert collectives(text.replace("\n", "\r\n"), abstract_mesh(4, 2)) == expected
        assert set(module.parse(text).computations) == {"main"}


def test_a_text_that_ends_too_early_is_refused():
    text = HEADER + "  %p = f32[8,4]{1,0} parameter(0)\n  ROOT %r = f32[8,4]{1,0} negate(%p)\n"
    assert module.parse(text + "}").entry == "main"
    for end, missing in (("", "it is cut off"), ("  %s = f32[8,4]{1,0} negate(%r", "bracket"),
                         ('  %s = f32[] negate(%r), metadata={op_name="a', "quote")):
        with pytest.raises(ValueError, match=f"expected a .*{missing}"):
            module.parse(text + end)


@pytest.mark.parametrize("groups,axes", [
    ("{{0,1},{2,3},{4,5},{6,7}}", ("model",)), ("{{6,4,2,0},{1,3,5,7}}", ("batch",)),
    ("{}", ("batch", "model")), ("{{0,2},{4,6},{1,3},{5,7}}", ("?",)),
    ("{{0},{1},{2},{3},{4},{5},{6},{7}}", None),
])
def test_groups_become_axes(groups, axes):
    moved = moved_by(f"ROOT %r = f32[8,4]{{1,0}} all-reduce(%p), channel_id=1, "
                     f"replica_groups={groups}, use_global_device_ids=true, to_apply=%add")
    assert moved == ({("all-reduce", axes): (1, 128)} if axes else {})


def test_unknown_groups_are_shown():
    text = HEADER + ("  %p = f32[8,4]{1,0} parameter(0)\n  ROOT %r = f32[8,4]{1,0} all-reduce(%p), "
                     "channel_id=1, replica_groups={{0,2},{4,6},{1,3},{5,7}}, "
                     "use_global_device_ids=true\n}\n")
    assert repr(collectives(text, abstract_mesh(4, 2))).endswith("{0,2} {4,6} {1,3} {5,7}")


def test_numbers_of_replicas_and_of_partitions():
    line = "ROOT %r = f32[8,4]{1,0} all-reduce(%p), %s, to_apply=%add"
    replicas = HEADER.replace("num_partitions=8", "replica_count=8")
    pairs = "replica_groups={{0,1},{2,3},{4,5},{6,7}}"
    assert moved_by(line.replace("%s", pairs), header=replicas) == {
        ("all-reduce", ("model",)): (1, 128)}
    one = "channel_id=1, replica_groups={{0}}"  # every partition of replica 0
    assert moved_by(line.replace("%s", one)) == {("all-reduce", ("batch", "model")): (1, 128)}
    swap = line.replace("all-reduce", "all-to-all").replace("%s", f"channel_id=1, {pairs}")
    assert moved_by(swap) == {("all-to-all", ("model",)): (1, 128)}


def test_axes_of_one_device_are_never_named():
    line = f"ROOT %r = f32[8,4]{{1,0}} all-reduce(%p), channel_id=1, {ALL}, to_apply=%add"
    assert moved_by(line, mesh=abstract_mesh(8, 1)) == {("all-reduce", ("batch",)): (1, 128)}
    three = AbstractMesh((2, 1, 4), ("a", "b", "c"))
    assert moved_by(line, mesh=three) == {("all-reduce", ("a", "c")): (1, 128)}


def test_every_collective_of_shard_map():
    mesh = jax.make_mesh((4, 2), ("batch", "model"), axis_types=(AxisType.Auto,) * 2)
    both = P(("batch", "model"))

    def f(x):  # 8 rows of 16 on each device
        gathered = jax.lax.all_gather(x, "model", tiled=True)
        swapped = jax.lax.all_to_all(jnp.sin(gathered), "batch", 0, 0, tiled=True)
        passed = jax.lax.ppermute(jnp.cos(swapped), "batch", [(i, (i + 1) % 4) for i in range(4)])
        scattered = jax.lax.psum_scatter(jnp.sin(passed), "model", tiled=True)
        return jax.lax.psum(jnp.cos(scattered), ("batch", "model"))

    made = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=both, out_specs=P(), check_vma=False))
    x = jax.ShapeDtypeStruct((64, 16), jnp.float32, sharding=NamedSharding(mesh, both))
    moved = collectives(made.lower(x).compile(), mesh)
    assert moved.along("batch", kind="all-to-all") == (1, 16 * 16 * 4)
    assert moved.along("batch", kind="collective-permute") == (1, 16 * 16 * 4)
    assert moved.along("model", kind="all-gather") == (1, 16 * 16 * 4)
    assert moved.along("model", kind="reduce-scatter") == (1, 8 * 16 * 4)
    assert moved.along("batch", "model") == (1, 8 * 16 * 4)
    assert moved.total.count == 5


def test_a_mesh_that_counts_its_devices_otherwise():
    """Groups are devices: seen from another mesh over the same devices, axes change their names."""
    mesh = jax.make_mesh((4, 2), ("batch", "model"), axis_types=(AxisType.Auto,) * 2)
    turned = jax.sharding.Mesh(mesh.devices.T, ("model", "batch"), axis_types=mesh.axis_types)
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, P("batch")))
    program = jax.jit(lambda x: x.sum(0)).lower(x).compile()
    assert collectives(program, mesh) == collectives(program, turned) != {}


@pytest.mark.parametrize("text,message", [
    ("module @jit_f {}", "ENTRY"), ("", "ENTRY"),
])
def test_other_texts_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        module.parse(text)


def test_bad_input_is_named():
    with pytest.raises(TypeError, match="found int"):
        module.parse(3)
    line = f"ROOT %r = f32[8,4]{{1,0}} all-reduce(%p), channel_id=1, {ALL}, to_apply=%add"
    text = f"{HEADER}  %p = f32[8,4]{{1,0}} parameter(0)\n  {line}\n}}\n"
    with pytest.raises(ValueError, match="of 8 devices; found a mesh of 4"):
        collectives(text, abstract_mesh(2, 2))
    with pytest.raises(ValueError, match="no mesh"):
        collectives(text, None)
    with pytest.raises(ValueError, match="of 1 device; found a mesh of 8"):
        collectives(text.replace(", num_partitions=8", ""), abstract_mesh(4, 2))
    kernel = HEADER + ('  %p = f32[8,4]{1,0} parameter(0)\n  ROOT %r = f32[8,8]{1,0} '
                       'custom-call(%p, %p), custom_call_target="tpu_custom_call"\n}\n')
    with pytest.raises(ValueError, match="found the kernel 'tpu_custom_call'"):
        work(kernel)


@pytest.mark.parametrize("line", [
    f"all-reduce(%p), channel_id=1, {ALL}",
    "all-gather(%p), channel_id=1, replica_groups=[1,8]<=[8], use_global_device_ids=true",
    "all-to-all(%p), channel_id=1, replica_groups=mesh['a'=2,'b'=4] {'b'}",
    "collective-permute(%p), source_target_pairs={{0,1},{1,7}}",
])
def test_devices_that_the_header_does_not_count_are_refused(line):
    """A header without numbers, as PyTorch/XLA writes it, is no program of one device."""
    text = f"{HEADER}  %p = f32[8,4]{{1,0}} parameter(0)\n  ROOT %r = f32[8,4]{{1,0}} {line}\n}}\n"
    collectives(text, abstract_mesh(8, 1))
    for count, mesh in ("", None), (", num_partitions=4", abstract_mesh(4, 1)):
        with pytest.raises(ValueError, match=r"below \d, as the program's header.*found 7 in %r"):
            collectives(text.replace(", num_partitions=8", count), mesh)


def test_numbers_of_replicas_beyond_their_count_are_refused():
    line = "ROOT %r = f32[8,4]{1,0} all-reduce(%p), replica_groups={{0,1,2,3,4,5,6,7}}"
    with pytest.raises(ValueError, match=r"below 1, .*replica_count=1, num_partitions=8.*found 7"):
        moved_by(line)


def test_products_that_a_gpu_hands_to_its_library():
    config = ('backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
              '{"lhs_contracting_dimensions":["1"]}}}')
    text = HEADER + ("  %p = f32[8,4]{1,0} parameter(0)\n  %q = f32[4,6]{1,0} parameter(1)\n"
                     "  ROOT %r = (f32[8,6]{1,0}, s8[64]{0}) custom-call(%p, %q), "
                     f'custom_call_target="__cublas$gemm", {config}\n}}\n')
    assert work(text) == 2 * 8 * 6 * 4
