"""The calculator's ranking: the rows that Python ranks, the chosen plan, ties, and reasons."""
import re
from dataclasses import replace

import pytest
from browsers import CHROMIUM
from calculator_page import asked, choose, fields_of, number, opened, written

from meshbook.costs.ranking import rank, ranked, ties

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium on the PATH")

ASKED = [
    {"rows": 32}, {"gpus": 2, "batch": 2, "rows": 4, "of": "Llama-like, 1B"},
    {"of": "JAXformer, with 16 experts", "on": "TPU v4", "slice": "2x2x2", "rows": 64},
    {"of": "OLMoE-like, 7B in 64 experts", "on": "TPU v5e", "slice": "1x1", "slices": 8, "rows": 8},
    {"of": "this book's ViT", "on": "TPU v6e", "slice": "2x2", "rows": 512},
    {"of": "this book's MiniGPT", "gpus": 4, "rows": 512, "dropout": 0},
    {"of": "this book's decoder", "on": "TPU v5e", "slice": "2x2", "rows": 64,
     "microbatches": 16},  # the first alone
    {"of": "Llama-like, 70B", "gpus": 8, "rows": 8}]


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    return written(tmp_path_factory.mktemp("calculator"))


@pytest.fixture
def tab(browser, address):
    with opened(browser, address) as tab:
        yield tab


def finished(tab):
    """The home of the ranking, when it is done."""
    home = tab.locator(".calculator-ranking")
    tab.wait_for_function("document.querySelector('.calculator-ranking').ariaBusy === 'false'",
                          timeout=120_000)
    return home


def lines(tab):
    """[[mesh, plan, step, memory]] of all rows."""
    return finished(tab).locator("tbody tr").evaluate_all(
        "rows => rows.map(row => [row.querySelector('span').firstChild.textContent,"
        " ...[...row.querySelectorAll('small, td')].map(each => each.textContent)])")


def are_shown(rows, found):
    """Whether these are the rows of some Ranked plans."""
    fitting = {each.plan: each.step for each in found if each.fits}
    tied = ties(fitting) if fitting else []
    assert len(rows) == len(found)
    for (where, _, step, memory), each in zip(rows, found, strict=True):
        tie = ", tie" if each.plan in tied and len(tied) > 1 else ""
        verdict = "" if each.fits else (
            ", does not fit" if each.peak > each.device.memory else ", tight")
        assert where == (each.plan.where or "one device")
        assert step.endswith(tie) and ("tie" in step) == bool(tie)
        assert number(step.removesuffix(tie)) == pytest.approx(each.step, rel=0.0051)
        assert memory.endswith(verdict) and ("," in memory) == bool(verdict)
        assert number(memory.removesuffix(verdict)) == pytest.approx(each.peak, rel=0.0051)


def with_chosen(found, chosen):
    """Ranked plans with another in its place, if it is none of them."""
    if any((each.step, each.peak) == (chosen.step, chosen.peak) for each in found):
        return found
    return sorted([*found, chosen], key=lambda each: (not each.fits, each.step))


@pytest.mark.parametrize("fields", ASKED, ids=lambda fields: fields.get("of", "Llama-like, 8B"))
def test_the_ranking_has_the_rows_of_python(tab, fields):
    choose(tab, **fields)
    config, plan, rows, machine = asked(fields_of(tab))
    found, refused = rank(config, rows, machine, plan.attention)
    are_shown(lines(tab), with_chosen(found, ranked(config, plan, rows, machine)))
    reasons = {}
    for mesh, why in refused.items():
        reasons.setdefault(why, []).append(mesh.where)
    said = finished(tab).locator("li").all_text_contents()
    for each, (why, meshes) in zip(said, reasons.items(), strict=True):
        many = len(meshes) > 4
        assert each == f"{why}: {f'{len(meshes)} meshes, such as ' if many else ''}" + (
            "; ".join(meshes[:4]))


def test_the_chosen_plan_is_marked_as_itself_in_its_place(tab):
    config, plan, rows, machine = asked(fields_of(tab))
    found, _ = rank(config, rows, machine, plan.attention)
    best = next(each for each in found if each.plan.where == "batch 8")

    def mine(**changes):
        choose(tab, **changes)
        chosen = ranked(config, asked(fields_of(tab))[1], rows, machine)
        shown = lines(tab)
        (at,) = [at for at, row in enumerate(shown) if "your choice" in row[1]]
        assert number(shown[at][2].partition(",")[0]) == pytest.approx(chosen.step, rel=0.0051)
        place = with_chosen(found, chosen).index(chosen)
        return at, place, len(shown) - len(found), shown[at], chosen

    at, place, more, row, _ = mine()
    assert (at, more) == (place, 1) and row[1].startswith("FSDP with regather; keeps its input")
    at, place, more, row, chosen = mine(rules=best.plan.rules, remat=best.plan.remat)
    assert (at, more) == (found.index(best), 0) and chosen.step == best.step
    at, place, more, row, chosen = mine(rules="fully_sharded_again")  # of the same mesh
    assert (at, more) == (place, 1) and row[1].startswith("FSDP with regather; keeps attention")
    at, place, more, row, chosen = mine(rules="data_parallel", remat="none")
    assert chosen.peak > machine.device.memory and (at, more) == (place, 1)
    assert row[3].endswith(", does not fit") and at >= sum(each.fits for each in found)
    assert f"Your choice is number {at + 1} of {len(found) + 1}." in (
        finished(tab).text_content())
    bold = tab.locator(".calculator-chosen").evaluate("each => getComputedStyle(each).fontWeight")
    assert int(bold) == 600


def test_a_plan_under_another_name_is_the_same_row(tab):
    choose(tab, on="TPU v5p", slice="2x2x2", rules="data_parallel", remat="attention")
    config, plan, rows, machine = asked(fields_of(tab))
    choose(tab, rules="tensor_parallel")  # of which one device along "model" is the same
    shown = [row for row in lines(tab) if "your choice" in row[1]]
    assert shown[0][1].startswith("data parallel (DDP)")
    one, other = (ranked(config, replace(plan, rules=rules), rows, machine)
                  for rules in ("data_parallel", "tensor_parallel"))
    assert (one.step, one.peak) == (other.step, other.peak)


def test_it_is_of_the_machine_and_the_batch_above_it_also_where_the_plan_is_none(tab):
    first = finished(tab).inner_text()
    assert re.match(r"35 meshes, ranked in [\d.]+ m?s\.", first)
    assert "All meshes of 8 H100, the fastest first" in first
    others = lambda: [row[2] for row in lines(tab) if "your choice" not in row[1]]
    before = others()
    choose(tab, rows=64)
    assert not set(before) & set(others())
    choose(tab, gpus=16)
    assert "All meshes of 16 H100" in finished(tab).inner_text()
    choose(tab, heads=3)
    assert finished(tab).inner_text().strip() == ""
    choose(tab, heads=32, batch=3)  # no mesh of sixteen devices
    assert "All meshes of 16 H100" in finished(tab).inner_text()
    assert "your choice" not in finished(tab).inner_text()
    choose(tab, on="TPU v5e", slice="2x2", slices=2)
    assert "All meshes of 2 × (2 × 2) TPU v5e" in finished(tab).inner_text()
    choose(tab, rows=7)
    before = finished(tab).inner_text()
    assert "No mesh of" in before or "All meshes of" in before
    choose(tab, of="this book's ViT", on="H100", gpus=8, rows=64)
    assert finished(tab).inner_text().strip() == (
        "No ranking: how long random numbers of dropout take on H100 is not known.")
    choose(tab, dropout=0)
    assert "All meshes of 8 H100" in finished(tab).inner_text()


def test_it_goes_on_while_somebody_types_and_what_was_open_stays_so(tab):
    finished(tab).locator("summary").first.press("Enter")
    choose(tab, gpus=64, rows=64)
    home = tab.locator(".calculator-ranking")
    assert home.get_attribute("aria-busy") == "true"
    choose(tab, rows=128)
    tab.wait_for_function("document.querySelector('.calculator-ranking p').innerText")
    assert re.match(r"Ranking: \d+ of 210 meshes", home.locator("p").first.inner_text())
    longest = tab.evaluate("""() => new Promise(done => {
      let [last, most] = [performance.now(), 0];
      const beat = () => {
        const now = performance.now();
        [most, last] = [Math.max(most, now - last), now];
        if (document.querySelector('.calculator-ranking').ariaBusy === 'false') done(most);
        else setTimeout(beat);
      };
      beat();
    })""")
    assert longest < 1000  # milliseconds in which nobody could type
    assert finished(tab).locator("details").first.get_attribute("open") is not None
    assert tab.locator(".calculator-ranking tbody tr >> visible=true").count() == len(lines(tab))
