"""What follows from an accelerator's rounds: rates, shares of peak, floors, ratios, targets."""

import re
import statistics

from meshbook.costs.devices import DEVICES, floors


def derived(cell, found, device):
    """What follows from the rounds: medians, rates, share of peak, floors, ratios. In place."""
    items, what = cell.items
    done = {name: each for name, each in found.items() if each.get("rounds")}
    known = [each["useful flops"] for each in found.values() if "useful flops" in each]
    for name, each in done.items():
        rounds = each["rounds"]
        step = each["step seconds"] = statistics.median(rounds)
        each[f"{what} a second"] = items / step
        useful = each.setdefault("useful flops", max(known, default=None))
        if device and useful:
            each["share of peak"] = useful / step / device.flops
            each["floors"] = floors(device, useful, each.get("moved bytes") or 0, 0)
        each["times as fast as"] = {
            other: statistics.median(
                b / a for a, b in zip(rounds, against["rounds"], strict=False))
            for other, against in done.items() if other != name}
    return {"items": items, "of": what, "contestants": found}


def device_of(kind):
    """The row of the table of devices that this device belongs to, or None."""
    fit = [name for name in DEVICES if re.search(rf"\b{re.escape(name)}\b", kind)]
    return DEVICES[max(fit, key=len)] if fit else None


def targets(record):
    """Rows (what, what was wished for on an H200, what was found) of the parts that are there."""
    def of(cell, name):
        return record["cells"].get(cell, {}).get("contestants", {}).get(name, {})

    def best(cell, names, key):
        values = [of(cell, name)[key] for name in names if key in of(cell, name)]
        return (min if key == "step seconds" else max)(values, default=None)

    vit, gpt = "vit, batch 1,024, bfloat16", "gpt, batch 256, 4 blocks, bfloat16"
    fast = ["fast", "fast, 8 steps a call", "and its own generator"]
    plain, small = of(gpt, "this book, plain loss"), best(
        "vit, batch 128, bfloat16", fast, "step seconds")
    one = ["fast, one-pass loss", "fast, one-pass kernel"]
    ratio = lambda each, other: each.get("times as fast as", {}).get(other)
    share = lambda each: (each["peak bytes"] / plain["peak bytes"]
                          if each.get("peak bytes") and plain.get("peak bytes") else None)
    ratios = lambda cell, names, other: max(
        (x for name in names if (x := ratio(of(cell, name), other))), default=None)
    rows = [
        ("ViT, batch 1,024: share of peak", "at least 0.35", best(vit, fast, "share of peak")),
        ("ViT, batch 1,024: times the sources' way", "at least 4",
         ratios(vit, fast, "the sources' way")),
        ("ViT, batch 128: ms a step", "at most 1.5", small and 1e3 * small),
    ]
    for loss in ("chunked", "one-pass"):
        each = of(gpt, f"this book, {loss} loss")
        rows += [(f"MiniGPT, {loss} loss: peak memory of the plain loss's", "at most 0.2",
                  share(each)),
                 (f"MiniGPT, {loss} loss: times the plain loss", "at least 0.95",
                  ratio(each, "this book, plain loss"))]
    return [*rows,
            ("MiniGPT, fast: share of peak", "at least 0.40", best(gpt, one, "share of peak")),
            ("MiniGPT, fast: times the plain loss", "at least 2",
             ratios(gpt, one, "this book, plain loss"))]


def show(name, part):
    """One line a contestant."""
    print(f"\n{name}")
    for contestant, each in part["contestants"].items():
        if "step seconds" not in each:
            print(f"  {contestant:26} {each.get('error', 'no round was finished')[:90]}")
            continue
        share = f"{each['share of peak']:6.1%} of peak" if "share of peak" in each else ""
        peak = f"{each['peak bytes'] / 2**30:7.2f} GiB" if each.get("peak bytes") else ""
        print(f"  {contestant:26} {1e3 * each['step seconds']:9.3f} ms  "
              f"{each[part['of'] + ' a second']:12,.0f} {part['of']}/s {share} {peak}", flush=True)
