"""The calculator's form in a browser, on a page of its own, and what Python says of its fields."""
import json
import re
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

import jax.numpy as jnp
from meshbook_site import CALCULATOR

from meshbook.costs import page
from meshbook.costs.devices import DEVICES
from meshbook.costs.machines import SLICES, Machine
from meshbook.costs.plans import AXES, Plan
from meshbook.costs.presets import MODELS
from meshbook.drawing.memory_timelines import WORDS
from meshbook.models.decoder_config import DecoderConfig
from meshbook.models.expert_layers import ExpertSizes

STATIC = Path(__file__).resolve().parents[2] / "book" / "_static"
UNITS = {"iB": 1024, "B": 1000, "FLOPs": 1000}
TIMES = {"µs": 1e-6, "ms": 1e-3, "s": 1, "hours": 3600,
         "years": 365.25 * 86_400}


def written(folder):
    """The page, as a file."""
    scripts = [f"const meshbookData = {json.dumps(page.data())};",
               f"const meshbookParts = {json.dumps(WORDS)};",
               *((STATIC / name).read_text("utf8") for name in CALCULATOR)]
    path = folder / "calculator.html"
    path.write_text(
        "<!doctype html><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<style>{(STATIC / 'meshbook.css').read_text('utf8')}</style><div id=calculator></div>"
        + "".join(f"<script>{each}</script>" for each in scripts), "utf8")
    return path.as_uri()


@contextmanager
def opened(browser, address):
    """A tab with the form; nothing may go wrong in it."""
    context, wrong = browser.new_context(), []
    tab = context.new_page()
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.goto(address)
    yield tab
    context.close()
    assert wrong == []


def show(tab, address, fields):
    """The form with these fields, by its address."""
    tab.goto("about:blank")
    tab.goto(f"{address}#{urlencode(fields)}")


def choose(tab, **fields):
    """Puts values into fields, one after the other, as a reader does."""
    for name, value in fields.items():
        field = tab.locator(f"[name={name}]")
        field.evaluate("each => each.closest('details')?.setAttribute('open', '')")
        if field.evaluate("each => each.tagName") == "SELECT":
            field.select_option(str(value))
        else:
            field.fill(str(value))


def fields_of(tab):
    """{field: value} of all that count."""
    return dict(tab.evaluate("[...new FormData(document.querySelector('form'))]"))


def asked(fields):
    """(config, plan, rows, machine) of a form's fields. Raises ValueError as Python does."""
    device, kind = DEVICES[fields["on"]], type(MODELS[fields["of"]])
    shape = ((int(fields["gpus"]),) if fields["on"] not in SLICES
             else tuple(map(int, fields["slice"].split("x"))))
    machine = Machine(device, shape, int(fields.get("slices", 1)))
    plan = Plan(**{axis: int(fields.get(axis, 1)) for axis in AXES},
                microbatches=int(fields["microbatches"]),
                **{name: fields[name] for name in ("rules", "schedule", "remat", "method",
                                                   "attention") if name in fields})
    return _config(kind, fields), plan, int(fields["rows"]), machine


def _config(kind, fields):
    sizes = {name: fields[name] for name in kind.__dataclass_fields__ if name in fields}
    sizes = {name: int(value) for name, value in sizes.items() if re.fullmatch(r"\d+", value)}
    sizes |= {"dropout": float(fields["dropout"]), "dtype": jnp.dtype(fields["dtype"])}
    if kind is DecoderConfig:
        sizes |= {name: fields[name] == "true" for name in ("gated", "bias")}
        if int(fields["count"]):
            preset = MODELS[fields["of"]].experts
            sizes["experts"] = ExpertSizes(
                int(fields["count"]), int(fields["active"]), int(fields["shared"]),
                float(fields["capacity"]), auxiliary=preset.auxiliary if preset else 0.0)
    return kind(**sizes)


def number(text):
    """What a number with a unit says: bytes, FLOPs or seconds, 0 of less than a microsecond."""
    value, _, unit = text.replace(",", "").partition(" ")
    if text in ("0", "under 1 µs"):
        return 0.0
    if unit in TIMES:
        return float(value) * TIMES[unit]
    end = next(end for end in UNITS if unit.endswith(end))
    power = " kMGTPEZYRQ".index(unit.removesuffix(end).upper().replace("K", "k") or " ")
    return float(value) * UNITS[end] ** power


def rows_of(tab, caption):
    """{first cell: [the others]} of a table."""
    lines = tab.locator("table", has=tab.locator(f"caption:text-is('{caption}')")).locator(
        "tbody tr").all_inner_texts()
    return {line.split("\t")[0].strip(): [cell.strip() for cell in line.split("\t")[1:]]
            for line in lines}
