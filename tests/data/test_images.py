"""Images: what is loaded, in which order it comes, and that a damaged folder is refused."""
import hashlib
import multiprocessing
import os
import pathlib
import subprocess
import sys
import textwrap
import threading
import types

import grain
import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.preprocessing import StandardScaler

from meshbook.data import images

CIFAR = os.environ.get("MESHBOOK_DATA")
needs_cifar = pytest.mark.skipif(not CIFAR, reason="MESHBOOK_DATA names no folder with CIFAR-10")
NAMES = ("train", "validation", "test")


@pytest.fixture(scope="module", params=["digits", pytest.param("cifar", marks=needs_cifar)])
def data(request):
    return images.load_digits() if request.param == "digits" else images.load(CIFAR)


@pytest.fixture
def numbered():
    """A hundred images, each filled with its own number."""
    number = np.arange(100)
    inputs = np.broadcast_to(number[:, None, None, None], (100, 4, 4, 3)).astype(np.uint8)
    return images.Images(inputs, number.astype(np.int32))


def labels_of(iterator, count):
    return [next(iterator)["labels"].tolist() for _ in range(count)]


def test_shapes_and_types(data):
    sizes = (1297, 200, 300) if data.is_stand_in else (45_000, 5_000, 10_000)
    for name, size in zip(NAMES, sizes):
        part = getattr(data, name)
        assert part.inputs.shape == (size, 32, 32, 3) and part.inputs.dtype == np.uint8
        assert part.labels.shape == (size,) and part.labels.dtype == np.int32
        assert set(part.labels.tolist()) == set(range(10))
    assert len(data.classes) == 10 and data.flip != data.is_stand_in
    assert ("stand-in" in data.source) == data.is_stand_in


def test_labels_of_any_data_set_of_torchvision_fit_in_int32():
    labels = [0, 127, 128, 255, 256, 32_767, 32_768, 65_535, 65_536, 2**31 - 1]
    data = types.SimpleNamespace(data=np.zeros((10, 2, 4, 3), np.uint8)[:, ::2], targets=labels)
    found = images.as_images(data)
    assert found.labels.dtype == np.int32 and found.labels.tolist() == labels
    assert found.inputs.flags.c_contiguous and len(found) == 10


def test_no_image_is_in_two_sets(data):
    prints = [{hashlib.sha256(image).digest() for image in getattr(data, name).inputs}
              for name in NAMES]
    total = sum(len(getattr(data, name)) for name in NAMES)
    assert len(set.union(*prints)) == sum(map(len, prints)) == total


def test_mean_and_deviation_are_those_of_the_training_pixels(data):
    pixels = data.train.inputs.reshape(-1, 3)
    for c in range(3):
        channel = pixels[:, c] / np.float32(255)
        assert abs(channel.mean(dtype=np.float64) - data.mean[c]) < 1e-6
        assert abs(channel.std(dtype=np.float64) - data.std[c]) < 1e-6
        normalised = (channel - data.mean[c]) / data.std[c]
        assert abs(normalised.mean(dtype=np.float64)) < 1e-4
        assert abs(normalised.std(dtype=np.float64) - 1) < 1e-4


@needs_cifar
def test_cifar10_has_its_true_mean_and_deviation():
    data = images.load(CIFAR)
    np.testing.assert_allclose(data.mean, (0.4914, 0.4822, 0.4465), atol=1e-3)
    np.testing.assert_allclose(data.std, (0.2470, 0.2435, 0.2616), atol=1e-3)
    assert data.classes[:3] == ("airplane", "automobile", "bird")


def test_the_split_is_the_same_every_time():
    first, second = images.load_digits(), images.load_digits()
    for name in NAMES:
        assert np.array_equal(getattr(first, name).inputs, getattr(second, name).inputs)
        assert np.array_equal(getattr(first, name).labels, getattr(second, name).labels)


def test_digits_keep_their_greys():
    grey = np.zeros((1, 8, 8))
    grey[0, :, 4:] = 16
    large = images.enlarge(grey)[0, :, :, 0]
    assert large[:, 0].tolist() == [0] * 32 and large[:, -1].tolist() == [255] * 32
    assert (np.diff(large.astype(int), axis=1) >= 0).all()


def test_digits_are_enlarged_as_torch_does():
    import torch

    raw = load_digits().images
    grey = torch.tensor(raw)[:, None] * 255 / 16
    theirs, nearest = (
        torch.nn.functional.interpolate(grey, (32, 32), mode=mode).round().numpy()[:, 0]
        for mode in ("bilinear", "nearest"))
    ours = images.enlarge(raw)
    assert all(np.array_equal(ours[..., c], theirs) for c in range(3))
    assert not np.array_equal(theirs, nearest)  # other interpolations would be noticed


def test_mean_and_deviation_are_those_of_scikit_learns_scaler():
    inputs = np.random.default_rng(0).integers(0, 256, (20, 8, 8, 3), np.uint8)
    inputs[:10] //= 4  # images differ in brightness
    scaler = StandardScaler().fit(inputs.reshape(-1, 3) / 255)
    mean, std = images.channel_statistics(inputs)
    np.testing.assert_allclose((mean, std), (scaler.mean_, scaler.scale_), rtol=1e-6)
    within = (inputs / 255).std((1, 2)).mean(0)  # the usual mistake is far outside
    assert (np.abs(within - scaler.scale_) > 1e-3 * scaler.scale_).all()


def test_an_epoch_uses_every_record_at_most_once_and_epochs_differ(numbered):
    epochs = np.array(labels_of(images.batches(numbered, 30, seed=1, epochs=2), 6)).reshape(2, 90)
    assert [len(set(epoch)) for epoch in epochs.tolist()] == [90, 90]
    assert epochs[0].tolist() != epochs[1].tolist()
    with pytest.raises(StopIteration):
        labels_of(images.batches(numbered, 30, seed=1, epochs=2), 7)


def test_labels_stay_with_their_images(numbered):
    batch = next(images.batches(numbered, 50, seed=3))
    assert batch["inputs"][:, 0, 0, 0].tolist() == batch["labels"].tolist()
    assert batch["inputs"].dtype == np.uint8 and batch["labels"].dtype == np.int32


def test_the_seed_decides(numbered):
    first, again, other = (images.batches(numbered, 20, seed) for seed in (1, 1, 2))
    first = labels_of(first, 12)
    assert first == labels_of(again, 12) and first != labels_of(other, 12)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_global_batches_do_not_depend_on_the_number_of_processes(numbered, count):
    whole = images.batches(numbered, 20, 7, process_index=0, process_count=1)
    shares = [images.batches(numbered, 20, 7, process_index=i, process_count=count)
              for i in range(count)]
    for _ in range(12):
        batch, parts = next(whole), [next(share) for share in shares]
        for name in batch:
            joined = np.concatenate([part[name] for part in parts])
            assert np.array_equal(joined, batch[name])
            assert {len(part[name]) for part in parts} == {20 // count}


@pytest.mark.parametrize("workers", [2, 4])
def test_global_batches_do_not_depend_on_the_number_of_workers(numbered, workers):
    plain = images.batches(numbered, 20, 7, epochs=2)
    helped = images.batches(numbered, 20, 7, epochs=2, workers=workers)
    for one, other in zip(plain, helped, strict=True):
        assert np.array_equal(one["inputs"], other["inputs"])
        assert np.array_equal(one["labels"], other["labels"])


def test_batches_are_made_where_they_are_asked_for_or_in_so_many_workers(numbered):
    """In other processes with workers; without them, in this thread and no other."""
    threads, before = threading.active_count(), set(multiprocessing.active_children())
    plain = images.batches(numbered, 20, 7)
    next(plain)
    assert threading.active_count() == threads
    assert set(multiprocessing.active_children()) == before
    helped = images.batches(numbered, 20, 7, workers=2)
    next(helped)
    assert len(set(multiprocessing.active_children()) - before) == 2


def test_resume_in_the_middle_of_an_epoch(numbered):
    iterator = images.batches(numbered, 10, seed=5)
    labels_of(iterator, 13)
    state = iterator.get_state()
    expected = labels_of(iterator, 20)
    other = images.batches(numbered, 10, seed=5)
    other.set_state(state)
    assert labels_of(other, 20) == expected
    iterator.set_state(state)
    assert labels_of(iterator, 20) == expected
    grain.experimental.assert_equal_output_after_checkpoint(
        images.batches(numbered, 10, seed=5, epochs=2))


def test_resume_with_workers(numbered):
    iterator = images.batches(numbered, 10, seed=5, workers=2)
    labels_of(iterator, 3)
    state = iterator.get_state()
    expected = labels_of(iterator, 5)
    iterator.set_state(state)
    assert labels_of(iterator, 5) == expected


def run_python(code, *arguments, **environment):
    code = textwrap.dedent(code)
    root = pathlib.Path(images.__file__).parents[2]
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            env=os.environ | {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
                            | environment)


def test_resume_in_a_new_process():
    train = images.load_digits().train
    iterator = images.batches(train, 128, seed=5)
    labels_of(iterator, 13)
    state = iterator.get_state()
    expected = labels_of(iterator, 4)
    process = run_python("""
        import ast, sys
        from meshbook.data import images
        iterator = images.batches(images.load_digits().train, 128, seed=5)
        iterator.set_state(ast.literal_eval(sys.argv[1]))
        print([next(iterator)["labels"].tolist() for _ in range(4)])
        """, state)
    out, err = process.communicate(timeout=120)
    assert out.strip() == str(expected), err


def test_two_real_processes_share_every_batch():
    processes = [run_python("""
        import os, sys
        import jax, numpy as np
        from jax.sharding import AxisType, PartitionSpec as P
        rank, port = int(sys.argv[1]), sys.argv[2]
        jax.config.update("jax_num_cpu_devices", 2)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        address = f"127.0.0.1:{port}"
        jax.distributed.initialize(address, 2, rank, coordinator_bind_address=address,
                                   initialization_timeout=60)
        from meshbook.data import images
        data = images.load_digits()
        prepare = images.Preparation(data.mean, data.std, flip=True)
        mesh = jax.make_mesh((4,), ("batch",), axis_types=(AxisType.Explicit,))
        rows = jax.NamedSharding(mesh, P("batch"))
        mine = images.batches(data.train, 64, seed=3)
        whole = images.batches(data.train, 64, seed=3, process_index=0, process_count=1)
        for step in range(25):
            batch, expected = next(mine), next(whole)
            placed = jax.make_array_from_process_local_data(rows, batch["inputs"])
            assert placed.shape == (64, 32, 32, 3) and len(batch["inputs"]) == 32
            for shard in placed.addressable_shards:
                assert np.array_equal(shard.data, expected["inputs"][shard.index])
        key = jax.random.key(step)
        ready = jax.jit(prepare)(placed, key)
        alone = np.asarray(jax.jit(prepare)(expected["inputs"], key))
        for shard in ready.addressable_shards:
            assert np.array_equal(shard.data, alone[shard.index])
        print("equal", jax.process_count())
        """, rank, free_port()) for rank in range(2)]
    for process in processes:
        out, err = process.communicate(timeout=180)
        assert out.strip() == "equal 2", err


def free_port(kept=[]):
    """One port for all the processes of this test run."""
    import socket

    if not kept:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            kept.append(probe.getsockname()[1])
    return kept[0]


@pytest.mark.parametrize("size", [0, 101])
def test_a_batch_that_does_not_fit(numbered, size):
    with pytest.raises(ValueError, match=f"batch_size {size} .* expected 1 to 100"):
        images.batches(numbered, size, seed=0)


def test_a_batch_that_does_not_divide(numbered):
    with pytest.raises(ValueError, match="batch_size 30 .* expected a multiple of 4"):
        images.batches(numbered, 30, seed=0, process_index=0, process_count=4)


@pytest.mark.parametrize("batch_size", [100, 64, 30, 200])
@pytest.mark.parametrize("count", [1, 2])
def test_evaluation_counts_every_image_once(numbered, batch_size, count):
    seen = []
    for index in range(count):
        for batch in images.evaluation_batches(numbered, batch_size, index, count):
            assert {name: len(batch[name]) for name in batch} == dict.fromkeys(
                ("inputs", "labels", "weight"), batch_size // count)
            assert batch["weight"].dtype == np.float32
            assert set(batch["weight"].tolist()) <= {0.0, 1.0}
            assert batch["inputs"][:, 0, 0, 0].tolist() == batch["labels"].tolist()
            seen += batch["labels"][batch["weight"] == 1].tolist()
    assert sorted(seen) == list(range(100))
