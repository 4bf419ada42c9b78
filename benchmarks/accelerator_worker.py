"""Processes that measure for `benchmarks.accelerator`: both ends of the line to one.

JAX and PyTorch each have a process of their own, so that neither takes the other's memory. It
reads requests, JSON in lines, and answers one at a time; what goes wrong is an answer too.
"""

import contextlib
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
import traceback

from benchmarks.__main__ import ROOT

SECONDS = 0.25  # a round of one contestant takes about as long


class Gone(RuntimeError):
    """A process ended, or did not answer in time."""


class Worker:
    """A process that answers one request at a time, and is started again after it broke."""

    def __init__(self, module, **environment):
        self.module, self.environment, self.process = module, environment, None

    def send(self, **request):
        """Start the process if there is none, and ask."""
        if self.process is None or self.process.poll() is not None:
            self.end()
            self._start()
        print(json.dumps(request), file=self.process.stdin, flush=True)

    def _start(self):
        read, write = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module, str(write)], cwd=ROOT, pass_fds=[write],
            stdin=subprocess.PIPE, text=True, env=os.environ | self.environment)
        os.close(write)
        self.answers = queue.Queue()
        threading.Thread(target=self._listen, args=(read, self.answers), daemon=True).start()

    @staticmethod
    def _listen(read, answers):
        with os.fdopen(read) as pipe:
            for line in pipe:
                answers.put(json.loads(line))
        answers.put(None)

    def receive(self, seconds):
        """The answer; Gone where the process ended or took longer."""
        try:
            found = self.answers.get(timeout=max(0.1, seconds))
        except queue.Empty:
            self.end()
            raise Gone(f"no answer within {seconds:.0f} seconds") from None
        if found is None:
            raise Gone(f"{self.module} ended with {self.process.wait()}")
        return found

    def ask(self, seconds, **request):
        """send and receive; RuntimeError with what the process says went wrong."""
        self.send(**request)
        found = self.receive(seconds)
        if found.keys() == {"error"}:
            raise RuntimeError(found["error"])
        return found

    def end(self):
        """End the process, and close the line to it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            with contextlib.suppress(BrokenPipeError):  # what it did not read any more
                self.process.stdin.close()


def does_not_fit(error):
    """The numbers of bytes in the message of a program that wants too much memory, or None."""
    text = str(error)
    if not re.search(r"RESOURCE_EXHAUSTED|out of memory", text, re.IGNORECASE):
        return None
    sizes = re.findall(r"[\d.,]+ ?(?:[KMGT]i?B|bytes)\b", text)
    return f"does not fit: {', '.join(dict.fromkeys(sizes)) or text.splitlines()[0][:200]}"


class Timer:
    """A contestant that is ready to run: call() sends off `steps` steps, wait(result) ends them."""

    def __init__(self, call, wait, steps=1):
        self.call, self.wait, self.steps, self.calls = call, wait, steps, 1

    def warm(self):
        """Run until it is warm; find how many calls make a round. Seconds of the first call."""
        begin = time.perf_counter()
        self.wait(self.call())
        first = time.perf_counter() - begin
        self.wait(self.call())
        self.calls = max(1, min(200, round(SECONDS / max(self.round() * self.steps, 1e-6))))
        return first

    def round(self):
        """Seconds a step, of one round."""
        begin = time.perf_counter()
        for _ in range(self.calls):
            result = self.call()
        self.wait(result)
        return (time.perf_counter() - begin) / self.calls / self.steps


def answer(descriptor, handlers):
    """Answer the requests on standard input until there are no more.

    handlers: {what to do: function of the rest of the request -> dict}.
    """
    with os.fdopen(int(descriptor), "w") as pipe:
        for line in sys.stdin:
            request = json.loads(line)
            try:
                found = handlers[request.pop("do")](**request)
            except Exception as error:
                found = failure(error)
            print(json.dumps(found), file=pipe, flush=True)


def contest(prepare):
    """The handlers of a process that runs contestants.

    prepare(cell) -> {name: (Timer, facts) or Exception}; cell: the fields of a Cell.
    """
    timers = {}

    def ready(cell):
        timers.clear()
        found = prepare(cell)
        failed = {name: failure(x) for name, x in found.items() if isinstance(x, Exception)}
        timers.update({name: x[0] for name, x in found.items() if name not in failed})
        return failed | {name: found[name][1] for name in timers}

    return {"prepare": ready, "warm": lambda name: {"first call": timers[name].warm()},
            "round": lambda name: {"seconds": timers[name].round()}}


def failure(error):
    """An exception as an answer."""
    said = does_not_fit(error) or "".join(traceback.format_exception_only(error)).strip()
    return {"error": said[:400]}
