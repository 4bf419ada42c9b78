"""Who is here: the processes of a run meet at one address, and say for whom they wait.

JAX's own service says nothing while it waits. So the processes meet once before it starts, on the
port that it will use: process 0 listens on exactly the address that it was given, and each other
process connects and says its number.
"""
import contextlib
import select
import socket
import time
from collections.abc import Callable

QUIET = 5.0  # seconds after which a process that waits says so, and how often


class NotTogether(RuntimeError):
    """Not all processes of a run have come, or the one that they meet at has not."""


def split_address(address: str):
    """(host, port) of "host:port". Raises ValueError for another form."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError("a coordinator's address is written as host:port, such as "
                         f"10.0.0.1:8476; found {address!r}")
    return host, int(port)


def meet(address: str, count: int, index: int, patience: float = 300.0,
         say: Callable = print, quiet: float = QUIET):
    """Return once all `count` processes are here; process 0 is the one that listens.

    patience, quiet: in seconds. Raises NotTogether, naming who has not come; ValueError where two
    processes have the same number, or another idea of how many there are.
    """
    waiting = Waiting(time.monotonic() + patience, quiet, say)
    if index == 0:
        receive(address, count, waiting)
    else:
        answer = report(address, count, index, waiting)
        if answer != "all here":
            raise ValueError(answer or f"process {index}: expected process 0 at {address} to say "
                             "that all are here, found that it has gone")


class Waiting:
    """A deadline, and a sentence every few seconds until then."""

    def __init__(self, end: float, quiet: float, say: Callable):
        self.end, self.quiet, self.say = end, quiet, say
        self.next = time.monotonic() + quiet

    def check(self, sentence: str):
        """Say it if it is time to; raises NotTogether with it at the end."""
        now = time.monotonic()
        if now > self.end:
            raise NotTogether(sentence)
        if now > self.next:
            self.next = now + self.quiet
            self.say(sentence)


def receive(address: str, count: int, waiting: Waiting):
    """Process 0: listen there and nowhere else, until every other process has come."""
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(split_address(address)))
        here = {}
        while len(here) < count - 1:
            for number in [number for number, other in here.items() if has_gone(other)]:
                del here[number]
                waiting.say(f"process {number} came and has gone; another may come in its place")
            missing = sorted(set(range(1, count)) - here.keys())
            waiting.check(f"process 0 at {address} waits for {processes(missing)} of {count}")
            if not select.select([listening], [], [], 0.1)[0]:
                continue
            other = stack.enter_context(listening.accept()[0])
            other.settimeout(2)
            with contextlib.suppress(OSError, ValueError):  # who is no process of a run
                number, its_count = map(int, other.recv(64).split())
                still = {each for each, one in here.items() if not has_gone(one)}
                if fault := refusal(number, its_count, count, still):
                    for each in (other, *here.values()):
                        each.sendall(fault.encode())
                    break
                here[number] = other
        else:
            for other in here.values():
                other.sendall(b"all here")
            return
    raise ValueError(fault)


def has_gone(other: socket.socket):
    """Whether a process that has said its number has ended: it sends nothing else but the end."""
    return bool(select.select([other], [], [], 0)[0])


def refusal(number: int, its_count: int, count: int, here: set[int]):
    """What is wrong with a process that has come, in a sentence; "" if nothing is."""
    if its_count != count:
        return (f"process {number} was started as one of {its_count} processes, and process 0 as "
                f"one of {count}")
    if number in here or not 0 < number < count:
        return f"expected each process from 0 to {count - 1} once, found process {number} twice" \
            if number in here or not number else \
            f"expected processes from 0 to {count - 1}, found process {number}"
    return ""


def report(address: str, count: int, index: int, waiting: Waiting):
    """Another process: say its number there, and return what process 0 answers."""
    while True:
        try:
            with socket.create_connection(split_address(address), timeout=2) as to_first:
                to_first.sendall(f"{index} {count}".encode())
                return answered(to_first, index, address, waiting)
        except OSError as error:
            waiting.check(f"process {index} waits for process 0, which is not at {address} "
                          f"({error.strerror or error})")
            time.sleep(0.1)


def answered(to_first: socket.socket, index: int, address: str, waiting: Waiting):
    """The answer of process 0, which waits for the others first."""
    while not select.select([to_first], [], [], 0.1)[0]:
        waiting.check(f"process {index} has reached process 0 at {address}, and waits with it for "
                      "the others")
    return to_first.recv(512).decode()


def processes(numbers: list[int]):
    """Numbers of processes as words: "process 3", "processes 1, 2 and 5"."""
    words = [str(number) for number in numbers]
    if len(words) == 1:
        return f"process {words[0]}"
    return f"processes {', '.join(words[:-1])} and {words[-1]}"
