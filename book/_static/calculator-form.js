// The form around meshbook.estimate: it reads the fields, and writes what a step needs.
"use strict";

(() => {
  const PARTS = meshbookParts; // {kind of memory: [words, colour]}, from the bottom upwards
  const {element, drawn, commas} = meshbookForm;
  const DECODER = {
    vocabulary: 50257, tokens: 256, embed: 256, hidden: 512, heads: 8, groups: 0, latent: 0,
    rotary: 0, layers: 4, period: 1, gated: 1, bias: 0, number: 4, remat: "none",
  };
  const SIZES = {
    ...meshbookForm.SIZES, Decoder: DECODER,
    JAXformer: {...DECODER, vocabulary: 100277, tokens: 1024, embed: 768, hidden: 3072, heads: 12,
                latent: 128, rotary: 128, layers: 48, period: 6, gated: 0, bias: 1, number: 2,
                remat: "all"},
  };
  const MODELS = {ViT: "ViT", MiniGPT: "MiniGPT", Decoder: "decoder",
                  JAXformer: "JAXformer"};
  const MORE_PRESETS = {
    sequence_parallel: "sequence parallel", zero1: "ZeRO-1", zero2: "ZeRO-2",
    fully_sharded_kept: "ZeRO-3",
    fully_sharded_again: "ZeRO-3, regather",
  };
  const presetsOf = model => "remat" in SIZES[model]
    ? {...meshbookForm.PRESETS, ...MORE_PRESETS} : meshbookForm.PRESETS;
  const ACTIVATIONS = {kept: "all kept", checkpointed: "checkpointed"};
  const OPTIONS = { // sizes that are chosen from these
    gated: {1: "SwiGLU", 0: "GELU"}, bias: {0: "none", 1: "everywhere"},
    number: {4: "float32", 2: "bfloat16"},
    remat: {none: "everything", products: "products", attention: "attention",
            all: "its input"},
  };
  const OR_NONE = ["groups", "latent", "rotary"]; // may be 0
  const LABELS = {
    image: "Image side, pixels", patch: "Patch side, pixels", classes: "Classes C",
    vocabulary: "Vocabulary", tokens: "Tokens T", embed: "Embed D", hidden: "Hidden F",
    heads: "Heads H", layers: "Layers L", batch: "Batch, all devices",
    rows: "Mesh: batch", across: "Mesh: model", preset: "Sharding", device: "Device", model: "Model",
    activations: "Activations", groups: "Groups, or 0",
    latent: "Latent R, or 0", rotary: "Rotary P", period: "Period",
    gated: "MLP", bias: "Biases", number: "Activations in", remat: "Kept of a layer",
  };
  const START = {model: "ViT", device: "TPU v5e", preset: "tensor_parallel", rows: 4, across: 2,
                 batch: 8192, activations: "kept"};

  const digits = number => number >= 100 ? commas(number) : Number(number.toPrecision(3)).toString();
  const scaled = (number, units, step) => {
    let at = 0;
    while (number >= step && at < units.length - 1) [number, at] = [number / step, at + 1];
    return `${digits(number)} ${units[at]}`;
  };
  const memoryOf = bytes => scaled(bytes, ["B", "KiB", "MiB", "GiB", "TiB"], 1024);
  const flopsOf = flops => scaled(flops, ["FLOPs", "kFLOPs", "MFLOPs", "GFLOPs", "TFLOPs",
                                          "PFLOPs"], 1000);
  const timeOf = seconds => scaled(seconds * 1e6, ["µs", "ms", "s"], 1000);

  const field = (name, input) =>
    element("label", {className: "calculator-field"}, element("span", {}, LABELS[name]), input);
  const select = (name, options) => element("select", {name}, ...Object.entries(options).map(
    ([value, words]) => element("option", {value}, words)));
  const number = (name, value, min = 1) =>
    element("input", {name, value, type: "number", min, step: 1, inputMode: "numeric"});

  const sum = numbers => numbers.reduce((all, each) => all + each, 0);
  const whole = ({held}) => sum(Object.values(held));
  const place = ({phase, block}) => block === null ? `in the ${phase}`
    : `in the ${phase} pass of ${block ? `block ${block}` : "the embedding"}`;
  const ticks = length => {
    const unit = 10 ** Math.floor(Math.log10(length / 2));
    const step = [1, 2, 5, 10].map(by => by * unit).find(step => length / step < 6);
    return Array.from({length: Math.floor(length / step) + 1}, (_, at) => step * at);
  };

  // The memory of a device over a step, kinds on each other, and the device's own as a line. Returns
  // the drawing, and the line that marks a moment.
  const LEFT = 56, WIDE = 338, HIGH = 150, TOP = 22;
  const timeline = (moments, limit, words) => {
    const most = Math.max(limit, ...moments.map(whole)), wide = WIDE / moments.length;
    const level = size => TOP + HIGH * (1 - size / most);
    const art = drawn("svg", {viewBox: `0 0 ${LEFT + WIDE + 4} ${TOP + HIGH + 22}`, role: "img",
                              "aria-label": words, fill: "currentColor"});
    const line = (x1, y1, x2, y2, more = {}) => drawn("line", {x1, y1, x2, y2,
                                                               stroke: "currentColor", ...more});
    const text = (x, y, words, anchor, more = {}) => drawn("text", {
      x, y, "text-anchor": anchor, "font-size": 11, ...more}, words);
    let floor = moments.map(() => 0);
    for (const [kind, [, fill]] of Object.entries(PARTS)) {
      const roof = moments.map(({held}, at) => floor[at] + held[kind]);
      const there = roof.map(size => `V${level(size)}h${wide}`).join("");
      const back = [...floor].reverse().map(size => `V${level(size)}h${-wide}`).join("");
      art.append(drawn("path", {d: `M${LEFT} ${level(floor[0])}${there}${back}z`, fill,
                                "data-kind": kind}));
      floor = roof;
    }
    const power = Math.min(3, Math.floor(Math.log(most) / Math.log(1024))), unit = 1024 ** power;
    for (const value of ticks(most / unit))
      art.append(line(LEFT - 4, level(value * unit), LEFT, level(value * unit)),
                 text(LEFT - 6, level(value * unit) + 4,
                      `${Number(value.toPrecision(3))} ${["B", "KiB", "MiB", "GiB"][power]}`, "end"));
    const base = TOP + HIGH, turn = LEFT + wide * moments.findIndex(
      ({phase}) => phase === "backward");
    const mark = line(0, TOP - 14, 0, base, {"stroke-width": 1.5, class: "calculator-mark"});
    art.append(
      line(LEFT, base, LEFT + WIDE, base),
      line(LEFT, level(limit), LEFT + WIDE, level(limit),
           {"stroke-width": 1.4, "stroke-dasharray": "6 4", class: "calculator-limit"}),
      line(turn, base, turn, base + 15), mark,
      text(turn - 5, base + 14, "← forward pass, loss", "end"),
      text(turn + 5, base + 14, "backward pass, update →", "start"));
    return [art, at => {
      for (const end of ["x1", "x2"]) mark.setAttribute(end, LEFT + wide * (at + 0.5));
    }];
  };
  const swatch = colour => {
    const made = element("span", {className: "calculator-swatch"});
    made.style.background = colour;
    return made;
  };
  const table = (caption, head, rows) => element("table", {className: "table"},
    element("caption", {}, caption),
    element("thead", {}, element("tr", {}, ...head.map(
      words => element("th", {scope: "col"}, words)))),
    element("tbody", {}, ...rows.map(row => element("tr", {}, ...row.map((cell, at) =>
      element(at ? "td" : "th", at ? {} : {scope: "row"}, cell))))));

  // A compiler needs more than the formula, and more of that with checkpoints: the page says how much.
  const verdict = (peak, memory, checkpointed) => {
    const share = `${memoryOf(peak)} of ${memoryOf(memory)} on each device`;
    if (peak > memory) return ["no", `Does not fit: ${share}`];
    return peak > (checkpointed ? 2 / 3 : 0.8) * memory ? ["tight", `Tight: ${share}`]
      : ["yes", `Fits: ${share}`];
  };

  // The timeline, a slider for its moments, and the bytes at the moment that is chosen.
  const overTime = (found, limit, words) => {
    const totals = found.timeline.map(whole), top = totals.indexOf(found.peak);
    const [art, moveTo] = timeline(found.timeline, limit, `Memory of a device over a step. ${words}, `
      + `${place(found.timeline[top])}. The dashed line is the device's memory.`);
    const slider = element("input", {type: "range", min: 0, max: totals.length - 1, value: top});
    const told = element("p", {className: "calculator-told"});
    const kinds = Object.keys(PARTS).filter(kind => found.memory[kind]).reverse();
    const bytes = table("Memory of each device", ["what", "bytes at most", "at this moment"],
      kinds.map(kind => [element("span", {}, swatch(PARTS[kind][1]), PARTS[kind][0]),
                         commas(found.memory[kind]), ""]));
    const cells = bytes.querySelectorAll("td:last-child");
    const show = () => {
      const at = Number(slider.value), moment = found.timeline[at];
      const words = `${memoryOf(totals[at])} ${place(moment)}${at === top ? ": the peak" : ""}`;
      kinds.forEach((kind, row) => { cells[row].textContent = memoryOf(moment.held[kind]); });
      slider.setAttribute("aria-valuetext", words);
      told.textContent = words;
      moveTo(at);
    };
    for (const part of [told, bytes]) part.setAttribute("aria-live", "off"); // the slider says it
    slider.addEventListener("input", show);
    show();
    return [art, element("label", {className: "calculator-moment"},
                         element("span", {}, "Moment of the step"), slider), told, bytes];
  };

  const shown = (found, {device, sizes, checkpointed, rows, across}) => {
    const keepsLess = checkpointed || (sizes.remat ?? "none") !== "none";
    const [kind, words] = verdict(found.peak, device.memory, keepsLess);
    const slowest = Math.max(...Object.values(found.floors));
    const floors = Object.entries(found.floors).map(([name, seconds]) => {
      const piece = element("span", {className: "calculator-floor"});
      piece.style.width = `${100 * seconds / slowest}%`;
      return [name, timeOf(seconds), piece];
    });
    const traffic = found.traffic.map(([what, axis, result, wire]) => [
      `${what} along ${axis}`, commas(result), commas(wire)]);
    const longest = Object.keys(found.floors).find(name => found.floors[name] === slowest);
    return [
      element("p", {className: `calculator-verdict calculator-${kind}`}, words),
      ...overTime(found, device.memory, words),
      table("Work of a step", ["what", "FLOPs"], [
        ["useful, of all devices", flopsOf(found.useful)],
        [`of each of ${rows * across} devices`, flopsOf(found.flops)],
        ["how often each is executed", `${digits(found.factor)} ×`]]),
      ...(checkpointed ? [element("p", {}, "Checkpointed blocks run forward twice. That adds at most "
        + "a third to the work, and repeats some of the collectives; neither is counted here.")] : []),
      traffic.length ? table("Collectives of a step",
        ["what", "result bytes per device", "wire bytes per device"], traffic)
        : element("p", {}, "This step has no collectives."),
      table("Floors of a step", ["limited by", "at least", ""], floors),
      element("p", {}, `No program that keeps ${keepsLess ? "what this one keeps" : "its activations"} in memory takes less than `
        + `${timeOf(slowest)} per step here, because of its `
        + `${longest === "memory" ? "traffic to memory" : longest}. A real one takes longer.`),
    ];
  };

  const build = (home, devices) => {
    const sizes = element("fieldset", {}, element("legend", {}, "Sizes"));
    const names = Object.fromEntries(Object.keys(devices).map(name => [name, name]));
    const form = element("form", {className: "calculator-form"},
      element("fieldset", {}, element("legend", {}, "What and where"),
        field("model", select("model", MODELS)),
        field("preset", select("preset", {})), field("device", select("device", names)),
        field("rows", number("rows", 4)), field("across", number("across", 2)),
        field("batch", number("batch", 1024)),
        field("activations", select("activations", ACTIVATIONS))), sizes);
    const output = element("div", {className: "calculator-output"});
    output.setAttribute("aria-live", "polite");
    home.replaceChildren(form, output);

    const fill = chosen => {
      for (const [name, value] of Object.entries({...START, ...chosen}))
        if (form.elements[name]) form.elements[name].value = value;
    };
    // The fields that a model has: its sizes, its presets, what is kept.
    const resize = (model, chosen = {}) => {
      sizes.replaceChildren(sizes.firstChild, ...Object.entries(SIZES[model]).map(
        ([name, value]) => {
          const input = OPTIONS[name] ? select(name, OPTIONS[name])
            : number(name, chosen[name] || value, OR_NONE.includes(name) ? 0 : 1);
          if (OPTIONS[name]) input.value = chosen[name] in OPTIONS[name] ? chosen[name] : value;
          return field(name, input);
        }));
      const preset = form.elements.preset, before = preset.value || START.preset;
      const presets = presetsOf(model);
      preset.replaceChildren(...Object.entries(presets).map(
        ([value, words]) => element("option", {value}, words)));
      preset.value = before in presets ? before : START.preset;
      const activations = form.elements.activations;
      activations.disabled = activations.parentNode.hidden = "remat" in SIZES[model];
    };
    const read = () => {
      const {model, preset, device, activations, remat, ...numbers} = Object.fromEntries(
        new FormData(form));
      for (const [name, text] of Object.entries(numbers)) {
        numbers[name] = text === "" ? NaN : Number(text);
        const least = OR_NONE.includes(name) || OPTIONS[name] ? 0 : 1;
        if (!Number.isInteger(numbers[name]) || numbers[name] < least)
          throw new RangeError(
            `${LABELS[name]} is a whole number from ${least}; found ${text || "nothing"}`);
      }
      const {rows, across, batch, ...own} = numbers;
      return {model, preset, rows, across, batch, sizes: {...own, remat}, device: devices[device],
              checkpointed: activations === "checkpointed"};
    };
    const update = () => {
      try {
        const choice = read();
        output.replaceChildren(...shown(meshbook.estimate(choice), choice));
        history.replaceState(null, "", `#${new URLSearchParams(new FormData(form))}`);
      } catch (error) {
        if (!(error instanceof RangeError)) throw error;
        output.replaceChildren(element("p", {className: "calculator-verdict calculator-no"},
                                       error.message));
      }
    };
    const chosen = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
    const model = SIZES[chosen.model] ? chosen.model : START.model;
    resize(model, chosen);
    fill({...chosen, model});
    form.addEventListener("input", event => {
      if (event.target.name === "model") resize(event.target.value);
      update();
    });
    form.addEventListener("submit", event => event.preventDefault());
    update();
  };

  const home = document.getElementById("calculator");
  if (home) build(home, meshbookDevices);
})();
