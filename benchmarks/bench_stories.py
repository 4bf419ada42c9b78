"""Tokens a second on one core, to the device: the source's pipeline, nanoGPT's, this book's.

All three draw batches of 256 rows of 256 tokens from the stories of MESHBOOK_DATA, or else of the
grammar. They run in turn in one process that is pinned to one core. The positions of a batch are
counted, also those that the source fills with padding.
"""
import os
import statistics
import time

B, T, ROUNDS, SECONDS = 256, 256, 5, 1.0


def run():
    """Tokens per second of each pipeline, in turn, and their ratios."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # before JAX makes its threads
    import jax
    from meshbook.data import stories

    data = stories.load()
    pipelines = {
        "a story at a time, as in the source": as_in_the_source(data),
        "slices at random places, as in nanoGPT": random_slices(data),
        "rows of a permutation": this_book(data),
        "rows of a permutation, documents apart": this_book(data, documents=True),
        "order and gather alone": this_book(data, place=lambda batch: batch),
    }
    rounds = [{name: rate(make) for name, make in pipelines.items()} for _ in range(ROUNDS)]
    medians = {name: statistics.median(each[name] for each in rounds) for name in pipelines}
    where = f"{data.source}, batch {B}, T {T}, {jax.devices()[0].device_kind}"
    rows = [{"name": name, "value": value, "unit": "tokens/s"} for name, value in medians.items()]
    rows[0]["note"], rows[2]["note"] = where, "asked for: 20,000,000"
    source, sliced, ours, *_ = pipelines
    return rows + [
        {"name": f"ratio to {other}", "value": medians[ours] / medians[name], "unit": "times",
         "note": "rounds {:.2f} to {:.2f}".format(*extremes(rounds, ours, name))}
        for other, name in (("the source", source), ("nanoGPT", sliced))]


def extremes(rounds, ours, theirs):
    """The smallest and the largest ratio of a round."""
    ratios = [each[ours] / each[theirs] for each in rounds]
    return min(ratios), max(ratios)


def rate(next_batch):
    """Positions per second of a function that makes one batch."""
    import jax

    jax.block_until_ready(next_batch())
    count, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < SECONDS:
        jax.block_until_ready(next_batch())
        count += B * T
    return count / (time.perf_counter() - begin)


def as_in_the_source(data):
    """Texts in a list, encoded, cut and padded one by one; columns, turned on the device."""
    import grain
    import jax
    import jax.numpy as jnp

    train = data.train
    texts = [data.encoding.decode(train.ids[a + 1:b].tolist()) + "<|endoftext|>"
             for a, b in zip(train.starts[:-1], train.starts[1:])]

    class Source:
        def __len__(self):
            return len(texts)

        def __getitem__(self, row):
            found = data.encoding.encode(texts[row], allowed_special={"<|endoftext|>"})[:T]
            return found + [0] * (T - len(found))

    def columns():
        while True:
            sampler = grain.samplers.IndexSampler(
                len(texts), shuffle=False, seed=42, num_epochs=1,
                shard_options=grain.sharding.NoSharding())
            batch = grain.transforms.Batch(B, drop_remainder=True)
            yield from grain.DataLoader(data_source=Source(), sampler=sampler, operations=[batch])

    shifted = jax.vmap(lambda row: jnp.concatenate((row[1:], jnp.array([0]))))
    loader = columns()

    def next_batch():
        inputs = jnp.array(jnp.array(next(loader)).T)
        return inputs, shifted(inputs)

    return next_batch


def random_slices(data):
    """A memory map, B random places in it, a slice of T and one of the next T for each."""
    import jax
    import numpy as np

    ids, random = data.train.ids, np.random.default_rng(0)

    def next_batch():
        places = random.integers(len(ids) - T, size=B)
        inputs = np.stack([ids[i:i + T].astype(np.int64) for i in places])
        labels = np.stack([ids[i + 1:i + 1 + T].astype(np.int64) for i in places])
        return jax.device_put({"inputs": inputs, "labels": labels})

    return next_batch


def this_book(data, documents=False, place=None):
    """This book's batches, on the device unless `place` says otherwise."""
    import jax
    from meshbook.data import tokens

    loader = tokens.batches(data.train, B, T, seed=0, documents=documents)
    return lambda: (place or jax.device_put)(next(loader))
