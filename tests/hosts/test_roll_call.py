"""The processes of a run meet, and each says for whom it waits; without JAX, in threads."""
import contextlib
import errno
import socket
import sys
import threading

import pytest

from meshbook.hosts import clusters, roll_call


def together(*calls, count=3, patience=5.0, quiet=5.0):
    """What each call of meet(index, count) said or raised, by place; they run side by side."""
    address, found = f"127.0.0.1:{clusters.free_port()}", [[] for _ in calls]

    def one(place, index, delay):
        threading.Event().wait(delay)
        try:
            roll_call.meet(address, count, index, patience, found[place].append, quiet)
            found[place].append("met")
        except (ValueError, roll_call.NotTogether) as error:
            found[place].append(f"{type(error).__name__}: {error}".replace(address, "HERE"))

    threads = [threading.Thread(target=one, args=(place, *call)) for place, call in
               enumerate(calls)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return [[line.replace(address, "HERE") for line in lines] for lines in found]


@pytest.mark.parametrize("delays", [(0, 0, 0), (0.5, 0, 0.2), (0, 0.5, 0.2)])
def test_all_meet_in_any_order(delays):
    assert together(*enumerate(delays)) == [["met"]] * 3


def test_one_process_meets_nobody():
    assert together((0, 0), count=1) == [["met"]]


def test_nothing_is_said_before_some_time_of_quiet_and_then_once_in_each(monkeypatch):
    now, said = [100.0], []
    monkeypatch.setattr(roll_call.time, "monotonic", lambda: now[0])
    waiting = roll_call.Waiting(120.0, 5.0, said.append)
    for now[0] in (100.0, 104.9, 105.1, 106.0, 110.0, 110.2, 120.0):
        waiting.check(f"waits, {now[0]:g}")
    assert said == ["waits, 105.1", "waits, 110.2", "waits, 120"]
    now[0] = 120.1
    with pytest.raises(roll_call.NotTogether, match="for nobody"):
        waiting.check("for nobody")


def test_who_waits_says_for_whom_and_gives_up_with_the_same_words():
    first, second = together((0, 0), (2, 0), count=4, patience=1.2, quiet=0.5)
    assert first[0] == "process 0 at HERE waits for processes 1, 2 and 3 of 4" or \
        first[0] == "process 0 at HERE waits for processes 1 and 3 of 4"
    assert first[-1] in ("NotTogether: process 0 at HERE waits for processes 1 and 3 of 4",
                         "NotTogether: process 0 at HERE waits for processes 1, 2 and 3 of 4")
    assert second[0] == ("process 2 has reached process 0 at HERE, and waits with it for the "
                         "others")
    assert second[-1].startswith(("NotTogether: process 2 has reached", "ValueError: process 2: "
                                  "expected process 0 at HERE to say that all are here"))


def test_a_coordinator_that_is_not_there_is_named():
    (said,) = together((1, 0), patience=0.5)
    assert said == ["NotTogether: process 1 waits for process 0, which is not at HERE "
                    "(Connection refused)"]


def test_two_processes_of_one_number_are_refused_by_all():
    found = together((0, 0), (1, 0), (1, 0.3))
    assert found[0] == ["ValueError: expected each process from 0 to 2 once, found process 1 twice"]
    assert found[0] == found[1] == found[2]


def test_a_process_that_ended_while_it_waited_can_be_started_again():
    address, said, lines = f"127.0.0.1:{clusters.free_port()}", [], []

    def others():
        with contextlib.suppress(roll_call.NotTogether):  # is here, and gives up
            roll_call.meet(address, 3, 1, 0.5, lines.append)
        while not said:
            threading.Event().wait(0.02)
        thread = threading.Thread(target=roll_call.meet, args=(address, 3, 1, 20.0))
        thread.start()
        roll_call.meet(address, 3, 2, 20.0)
        thread.join()

    thread = threading.Thread(target=others)
    thread.start()
    roll_call.meet(address, 3, 0, 20.0, said.append)
    thread.join()
    assert said == ["process 1 came and has gone; another may come in its place"]


def test_a_process_that_expects_another_number_of_processes_is_refused():
    address, errors = f"127.0.0.1:{clusters.free_port()}", []

    def other():
        with pytest.raises(ValueError, match="started as one of 4 processes, and process 0 as one"):
            roll_call.meet(address, 4, 1, 5.0)
        errors.append("refused")

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(ValueError, match="process 1 was started as one of 4 processes"):
        roll_call.meet(address, 2, 0, 5.0)
    thread.join()
    assert errors == ["refused"]


def test_a_stranger_at_the_door_is_not_let_in():
    address = f"127.0.0.1:{clusters.free_port()}"

    def stranger():
        for _ in range(50):
            try:
                with socket.create_connection(roll_call.split_address(address), 1) as door:
                    door.sendall(b"GET / HTTP/1.1\r\n\r\n")
                    break
            except OSError:
                threading.Event().wait(0.05)
        roll_call.meet(address, 2, 1, 5.0)

    thread = threading.Thread(target=stranger)
    thread.start()
    roll_call.meet(address, 2, 0, 5.0)
    thread.join()


def test_who_says_nothing_holds_nobody_up():
    address = f"127.0.0.1:{clusters.free_port()}"

    def quiet():
        with socket.socket() as door:
            while door.connect_ex(roll_call.split_address(address)):
                threading.Event().wait(0.02)
            roll_call.meet(address, 2, 1, 20.0)  # while the other connection is still open

    thread = threading.Thread(target=quiet)
    thread.start()
    roll_call.meet(address, 2, 0, 20.0)
    thread.join()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs all of 127.0.0.0/8")
def test_process_0_listens_at_its_address_and_at_no_other():
    port, found = clusters.free_port(), {}

    def others():
        with socket.socket() as door:
            while door.connect_ex(("127.0.0.1", port)):
                threading.Event().wait(0.02)
        for host in ("127.0.0.2", "127.1.2.3"):
            with socket.socket() as door:
                found[host] = door.connect_ex((host, port))
        roll_call.meet(f"127.0.0.1:{port}", 2, 1, 20.0)

    thread = threading.Thread(target=others)
    thread.start()
    roll_call.meet(f"127.0.0.1:{port}", 2, 0, 20.0)
    thread.join()
    assert set(found.values()) == {errno.ECONNREFUSED}


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:0", "host:70000", "host:x"])
def test_an_address_of_another_form_is_refused(text):
    with pytest.raises(ValueError, match="written as host:port, such as 10.0.0.1:8476; found"):
        roll_call.split_address(text)
