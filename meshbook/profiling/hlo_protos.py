"""Read what the instructions of a profile's programs do, from the HLO protos in its file.

An instruction's name need not tell: a `psum` is often called %psum.7, and is an all-reduce. The
programs stand in the file, as attachments that JAX's reader does not give, so they are read here
from the bytes.

Source: openxla/xla, `third_party/tsl/tsl/profiler/protobuf/xplane.proto` (XSpace, XPlane,
XEventMetadata, XStat) and `xla/service/hlo.proto`; protobuf.dev, "Encoding".
"""

CALLS = ("fusion", "while", "conditional", "call")


def opcodes(contents: bytes):
    """{(program, instruction): (opcode, {instruction: opcode} in what it calls)} of a file."""
    # Fields are asked for by number: that, and not their names, is what the encoding holds.
    found = {}
    for plane in _all(contents, 1):
        if _all(plane, 2) == [b"/host:metadata"]:
            hlo = _numbers_of_hlo(plane)
            for entry in _all(plane, 4):  # a map: its value is an event's metadata
                (data,) = _all(entry, 2)
                program = _all(data, 2)[0].decode()
                for proto in (each for stat in _all(data, 5) if _all(stat, 1) in hlo
                              for each in _all(stat, 6)):
                    known = _opcodes_of(_all(proto, 1)[0])
                    for name in (program, program.partition("(")[0], ""):  # as events may name it
                        found.update({(name, each): known[each] for each in known})
    return found


def _numbers_of_hlo(plane):
    """The numbers of the attachments that are HLO protos, each as a list of its own.

    A TPU's profile may have others, such as the code of its core ("llo_proto").
    """
    known = [data for entry in _all(plane, 5) for data in _all(entry, 2)]  # a map, as of events
    return [_all(data, 1) for data in known if [
        name.lower().replace(b" ", b"_") for name in _all(data, 2)] == [b"hlo_proto"]]


def _opcodes_of(module):
    computations = {}
    for computation in _all(module, 3):
        (number,) = _all(computation, 5)
        computations[number] = [
            (_all(each, 1)[0].decode(), _all(each, 2)[0].decode(), _numbers(_all(each, 38)))
            for each in _all(computation, 2)]

    def inside(called):
        found = {}
        for number in called:
            for instruction, opcode, further in computations.get(number, ()):
                found |= {instruction: opcode, **inside(further)}
        return found

    # What a reduction applies to each pair of numbers says nothing of what is reduced.
    return {instruction: (opcode, inside(called)
            if opcode in CALLS or opcode.startswith("async") else {})
            for body in computations.values() for instruction, opcode, called in body}


def _all(message, number):
    """The values of one field of an encoded protocol buffer: bytes, or whole numbers."""
    values, at = [], 0
    while at < len(message):
        key, at = _varint(message, at)
        if key & 7 == 0:
            value, at = _varint(message, at)
        else:
            size, at = _varint(message, at) if key & 7 == 2 else ({1: 8, 5: 4}[key & 7], at)
            value, at = message[at: at + size], at + size
        if key >> 3 == number:
            values.append(value)
    return values


def _varint(message, at):
    value = shift = 0
    while True:
        byte, at = message[at], at + 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at


def _numbers(values):
    """A repeated whole number, packed into bytes or not."""
    numbers = []
    for value in values:
        if isinstance(value, int):
            numbers.append(value)
            continue
        at = 0
        while at < len(value):
            number, at = _varint(value, at)
            numbers.append(number)
    return numbers
