"""What the processes of a run tell each other beside their arrays: at most a few kilobytes of JSON.

It goes through the store of JAX's coordinator, not through the devices, so a thread that writes in
the background can wait for other processes while training goes on.
"""
import collections
import json
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from meshbook.saving.identities import differences, plain

QUIET, PATIENCE = 10, 600  # seconds until a process says for whom it waits; until it gives up
times = collections.Counter()  # how often a name was used: equal in all processes


class Missing(TimeoutError):
    """A process that did not say what all others said."""


def told_by_all(name: str, value: Any, patience: float = PATIENCE):
    """[what each process says under this name], in their order; value: JSON values.

    Every process has to call it, with the same names in the same order in each of its threads.
    Raises Missing, naming the processes that did not in `patience` seconds.
    """
    if not jax.distributed.is_initialized():  # process_count() would start JAX's devices
        return [value]
    from jax._src.distributed import global_state  # the store has no public name yet

    store, me, count = global_state.client, jax.process_index(), jax.process_count()
    number, end = times[name], time.monotonic() + patience
    times[name] += 1
    store.key_value_set(f"{name}/{number}/{me}", json.dumps(value))
    found = [waited_for(store, name, number, each, end) for each in range(count)]
    if number:  # whoever is here has read what was said before
        store.key_value_delete(f"{name}/{number - 1}/{me}")
    return [json.loads(each) for each in found]


def waited_for(store: Any, name: str, number: int, process: int, end: float):
    """What one process says; every few seconds, that it is waited for."""
    while True:
        try:
            left = max(0.1, min(QUIET, end - time.monotonic()))
            return store.blocking_key_value_get(f"{name}/{number}/{process}", int(1000 * left))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
        words = f"process {jax.process_index()} waits for process {process} at {name!r}"
        if time.monotonic() > end:
            raise Missing(words) from None
        print(words, file=sys.stderr, flush=True)


def check_same(what: str, value: Any):
    """ValueError, naming the process and what differs, unless all processes have this value.

    value: a dict, or a dataclass, as identities.plain() takes it.
    """
    found = told_by_all(f"the same {what}", plain(value))
    for process, theirs in enumerate(found):
        if faults := differences(theirs, found[0]):
            raise ValueError(f"process {process} has another {what} than process 0: "
                             f"{'; '.join(faults[:5])}")


def first_fault(faults: list[str]):
    """The first fault that a process has told, with its number; "" if there is none."""
    return next((f"process {process}: {each}" if len(faults) > 1 else each
                 for process, each in enumerate(faults) if each), "")


class AnyOf:
    """Whether any process raised its flag, equal in all of them: a tiny all-reduce on the devices.

    raised(flag) gives the answer of the call before, so that nobody waits for the devices. Every
    process has to call it at the same steps.
    """

    def __init__(self):
        devices = np.array(jax.devices())
        rows = NamedSharding(Mesh(devices, "all"), P("all"))
        put = lambda flag: jax.make_array_from_callback(
            devices.shape, rows, lambda index: np.full(1, flag, np.int32))
        self.flags, self.before = (put(0), put(1)), None
        everywhere = NamedSharding(rows.mesh, P())
        self.largest = jax.jit(jnp.max, out_shardings=everywhere)

    def raised(self, flag: bool):
        before, self.before = self.before, self.largest(self.flags[flag])
        return before is not None and bool(before)
