"""A corpus by Ray: the same jobs, spread over a cluster by Ray Data (pip install 'meshbook[ray]').

    ray.init(address="auto")
    build_corpus(plan, "gs://bucket/corpus", encoding, RayData(64))

All workers must reach inputs and output by the same URLs: on several machines, in a bucket or on a
disk that they share. Ray restarts a worker that ends, and makes its items again: jobs allow that.
A Ray that is started on one machine (version 2.60) listens on every address, with its dashboard off
and 127.0.0.1 asked for, and runs what it is sent: start it where nobody else can reach it, such as
in a network namespace of its own (unshare --net).
"""
import json
from collections.abc import Callable, Iterable
from typing import Any


class RayData:
    """Work on `count` workers of the Ray cluster that this process is connected to."""

    def __init__(self, count: int):
        self.count = count

    def run(self, job: Callable, items: Iterable):
        """Yield what the job returns for each item, in order; its first error is raised."""
        import ray.data

        ray.data.DataContext.get_current().enable_progress_bars = False
        rows = [{"number": n, "item": json.dumps(item)} for n, item in enumerate(items)]
        made = ray.data.from_items(rows, override_num_blocks=len(rows)).map(
            Job, fn_constructor_args=(job,),
            compute=ray.data.ActorPoolStrategy(size=min(self.count, len(rows))))
        # Results come as they are ready; whoever asks for them counts on the order of the items.
        found = {row["number"]: json.loads(row["result"]) for row in made.iter_rows()}
        yield from (found[number] for number in range(len(rows)))

    def everywhere(self, job: Callable):
        """What the job returns once on each machine of the cluster."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        there = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
        task = ray.remote(_once)
        return ray.get([task.options(scheduling_strategy=each).remote(job) for each in there])


class Job:
    """In a worker: the job, which is sent once; rows go in and out as JSON."""

    def __init__(self, job: Callable):
        self.job = job

    def __call__(self, row: dict[str, Any]):
        result = self.job(json.loads(row["item"]))
        return {"number": row["number"], "result": json.dumps(result)}


def _once(job):
    """In a worker: the job, once."""
    return job(0)
