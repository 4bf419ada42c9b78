"""Every picture that a test here draws is one that somebody has looked at.

pictures.json knows them: of each file of tests, for each picture the hash of all but its numbers,
how many numbers there are, and one sum of them, in which each has a weight of its own. Another
picture fails its test and is written to _build/pictures. When it is right, `make pictures` writes
the file anew.
"""
import json
import os
from pathlib import Path

import pytest
from pictures import is_like, marks

from meshbook.drawing import svg

HERE = Path(__file__).parent
KNOWN, LOOK = HERE / "pictures.json", HERE.parents[1] / "_build" / "pictures"
WRITES = "MESHBOOK_PICTURES" in os.environ  # `make pictures`
MADE, FOUND = [], {}


@pytest.fixture(autouse=True, scope="session")
def remembered():
    """Have a Picture remember that it was made."""
    make = svg.Picture.__init__

    def made(self, *given, **named):
        make(self, *given, **named)
        MADE.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(svg.Picture, "__init__", made)
        yield


@pytest.fixture(autouse=True)
def looked_at(request, remembered):
    """After a test, what it drew is compared; what chance drew is not."""
    yield
    made, name = [picture.html for picture in MADE], request.path.name
    MADE.clear()
    if getattr(request.function, "is_hypothesis_test", False):
        return
    if WRITES:
        FOUND.setdefault(name, []).extend(map(marks, made))
        return
    known = json.loads(KNOWN.read_text("utf8")).get(name, [])
    for html in made:
        found = marks(html)
        if not any(is_like(found, each) for each in known):
            LOOK.mkdir(parents=True, exist_ok=True)
            path = LOOK / f"{found[0]}.html"
            path.write_text(f"<body>{html}</body>", "utf8")
            pytest.fail(f"a picture that nobody has looked at: {path}; where it is right, `make "
                        f"pictures` takes it for known")


def pytest_sessionfinish(exitstatus):
    if WRITES and exitstatus == 0:
        rows = {name: sorted({tuple(each) for each in of}) for name, of in sorted(FOUND.items())}
        text = ",\n".join(f' "{name}": [\n' + ",\n".join(
            f"  {json.dumps([each[0], each[1], round(each[2], 2)])}" for each in of) + "\n ]"
            for name, of in rows.items() if of)
        KNOWN.write_text(f"{{\n{text}\n}}\n", "utf8")
