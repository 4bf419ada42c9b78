"""Where the book teaches what the package has: sections are read right, and every entry finds one."""

import ast
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import teaching
from bs4 import BeautifulSoup
from teaching import NAMED, SHOWN, TAUGHT, USED

from meshbook.costs import memory, tiles, timeline
from meshbook.planning import memory_model
from meshbook.training import fit

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "_build" / "html" / "book"
API = (ROOT / "book" / "api.md").read_text("utf8")
KNOWN = {"a.tiled": tiles.tiled, "a.step_peak": timeline.step_peak, "b.fit": memory_model.fit,
         "c.fit": fit, "a.kept_bytes": memory.kept_bytes}

PAGE = """---
kernel: none
---
# The page

```{code-cell}
from meshbook.costs import memory, tiles, timeline
```

## One section

Read `tiles.tiled(8, 8)`, and `fit`.

```{code-cell} ipython3
:tags: [hide-input]
# # no heading
timeline.step_peak({})
```

## Another

```{code-cell} ipython3
size = tiles.tiled(1, 1)
```

````{exercise}
:class: dropdown
What does `step_peak` say?

```python
memory.kept_bytes(None)
```
````
"""


def where(text, known=KNOWN):
    return {name: (place.how, place.section.title)
            for name, place in teaching.places(known, {"page": text}).items()}


def test_a_page_is_cut_at_its_headings():
    found = teaching.sections("page", PAGE)
    assert [(each.number, each.title) for each in found] == [
        (0, "The page"), (1, "One section"), (2, "Another")]
    assert [len(each.cells) for each in found] == [1, 1, 1]
    assert found[1].cells == [("# # no heading\ntimeline.step_peak({})\n", True)]
    assert "What does `step_peak` say?" in found[2].prose


def test_code_that_is_seen_counts_more_than_folded_code_and_words():
    assert where(PAGE) == {"a.tiled": (USED, "Another"), "a.step_peak": (NAMED, "One section")}
    named = PAGE.replace("size =", "size = timeline.step_peak({}) +")
    assert where(named)["a.step_peak"] == (TAUGHT, "Another")


def test_a_definition_is_that_of_the_same_name_and_arguments():
    cell = "\n## Defined\n\n```{code-cell}\n%s\n```\n"
    source = "def fit(cells):\n    return 1"
    assert where(PAGE + cell % source)["b.fit"] == (SHOWN, "Defined")
    assert "c.fit" not in where(PAGE + cell % source)
    assert not {"b.fit", "c.fit"} & where(PAGE + cell % "def fit(x):\n    pass").keys()
    shown = "from helpers import show\nshow(tiles.tiled)"
    assert where(PAGE + cell % shown)["a.tiled"] == (SHOWN, "Defined")


def test_of_two_sections_as_good_the_earlier_counts():
    found = teaching.places(KNOWN, {"one": PAGE, "two": PAGE})
    assert {place.section.page for place in found.values()} == {"one"}


def test_what_only_the_package_uses_leads_to_its_user():
    known = {"costs.step_peak": timeline.step_peak, "costs.step_timeline": timeline.step_timeline,
             "costs.step_memory": memory.step_memory, "costs.tiled": tiles.tiled}
    cell = "from meshbook.costs.timeline import step_peak as m\nm(1)\n"
    text = f"# A\n\n```{{code-cell}}\n{cell}```\n"
    found = teaching.with_helpers(known, teaching.places(known, {"page": text}))
    assert {name: place.by for name, place in found.items()} == {
        "costs.step_peak": None, "costs.step_timeline": "costs.step_peak",
        "costs.step_memory": "costs.step_timeline"}
    assert found["costs.step_timeline"].words == "Used by step_peak, which is used in"


def test_of_a_module_only_the_listed_members_are_entries():
    fence = ".. automodule:: meshbook.costs.memory\n   :members: step_memory,\n      kept_bytes\n\n"
    other = ".. automodule:: meshbook.parallel.accumulation\n   :members:\n```\n"
    found = teaching.entries(f"```{{eval-rst}}\n{fence}{other}")
    assert {name for name in found if "costs" in name} == {
        "meshbook.costs.memory.step_memory", "meshbook.costs.memory.kept_bytes"}
    assert "meshbook.parallel.accumulation.in_microbatches" in found


@pytest.fixture(scope="module")
def places():
    return teaching.book_places(ROOT, teaching.entries(API))


def test_nearly_every_entry_leads_to_a_section_and_most_to_one_that_shows_it(places):
    known = teaching.entries(API)
    assert len(known) > 200
    assert len(known) - len(places) <= 8, sorted(known.keys() - places.keys())
    direct = [place for place in places.values() if place.by is None]
    assert len(direct) > 0.55 * len(known)
    assert sum(place.how >= TAUGHT for place in direct) > 25


def test_the_entries_that_a_reader_looks_for_first_are_found(places):
    found = {name.removeprefix("meshbook."): place.section for name, place in places.items()}
    assert found["sharding.make_mesh"][:3] == ("02-device-mesh", 1, "The mesh")
    assert found["sharding.Rules"].page == "04-sharded-vision-transformer"
    assert found["training.fit"].page == "03-vision-transformer"
    assert found["saving.checkpoints.Checkpoints"].page == "checkpoints"


def test_the_build_finds_the_places_that_any_other_process_finds(places):
    code = ("import sys; sys.path[:0] = ['book/_ext', '.']; import teaching; from pathlib import Path\n"
            "known = teaching.entries(Path('book/api.md').read_text('utf8'))\n"
            "found = teaching.book_places(Path('.').resolve(), known)\n"
            "print({name: (each.section[:2], each.by) for name, each in found.items()})")
    here = {name: (each.section[:2], each.by) for name, each in places.items()}
    for seed in "12":
        run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                             env=os.environ | {"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"})
        assert ast.literal_eval(run.stdout) == here, run.stderr


@pytest.mark.skipif(not SITE.exists(), reason="no site in _build/html: make book")
def test_every_entry_of_the_built_page_has_its_link_and_it_leads_to_that_section(places):
    entries = parts_of("api.html")
    for name, place in places.items():
        link = entries[name].find_parent("dl").select_one("dd > p.taught a")
        target, _, anchor = link["href"].partition("#")
        assert target == f"{place.section.page}.html"
        heading = parts_of(target)[anchor].find(re.compile("^h[1-6]$"))
        plain = re.sub(r"[`*#\\]|\{\w+\}", "", place.section.title)
        assert re.sub(r"\W+", "", heading.get_text()).startswith(re.sub(r"\W+", "", plain)[:12])
    assert sum("taught" in each.get("class", ()) for each in entries[""].find_all("p")) == len(places)


@functools.cache
def parts_of(name):
    """{id: element} of a page of the site, and "" for all of it: read once, it takes seconds."""
    page = BeautifulSoup((SITE / name).read_text("utf8"), "html.parser")
    return {each["id"]: each for each in page.find_all(id=True)} | {"": page}
