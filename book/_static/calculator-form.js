// The form around meshbook.estimate: it reads the fields, and writes what a step needs.
"use strict";

(() => {
  const PARTS = {
    parameters: ["parameters", "#0072b2"], moments: ["Adam's two moments", "#56b4e9"],
    gathered: ["weights gathered for their products", "#009e73"],
    inputs: ["inputs", "#858585"], activations: ["activations", "#d55e00"],
    logits: ["logits, and what the loss keeps", "#e69f00"], gradients: ["gradients", "#c2689a"],
  };
  const PRESETS = {data_parallel: "data parallel", tensor_parallel: "tensor parallel",
                fully_sharded: "fully sharded"};
  const SIZES = {
    ViT: {image: 32, patch: 4, classes: 10, embed: 384, hidden: 1536, heads: 8, layers: 6},
    MiniGPT: {vocabulary: 50257, tokens: 256, embed: 256, hidden: 256, heads: 8, layers: 4},
  };
  const LABELS = {
    image: "Image, pixels a side", patch: "Patch, pixels a side", classes: "Classes C",
    vocabulary: "Vocabulary", tokens: "Tokens T", embed: "Embed D", hidden: "Hidden F",
    heads: "Heads H", layers: "Layers L", batch: "Batch, all devices",
    rows: "Mesh: batch", across: "Mesh: model", preset: "Sharding", device: "Device", model: "Model",
  };
  const START = {model: "ViT", device: "TPU v5e", preset: "tensor_parallel", rows: 4, across: 2,
                 batch: 8192};

  const element = (tag, properties = {}, ...children) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(properties))
      name in made ? made[name] = value : made.setAttribute(name, value);
    made.append(...children);
    return made;
  };
  const commas = number => Math.round(number).toLocaleString("en-US");
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
  const number = (name, value) =>
    element("input", {name, value, type: "number", min: 1, step: 1, inputMode: "numeric"});

  const bar = (parts, limit, words) => {
    const total = Math.max(limit, parts.reduce((all, [, size]) => all + size, 0));
    const line = element("span", {className: "calculator-limit"});
    line.style.left = `${100 * limit / total}%`;
    const pieces = parts.map(([colour, size]) => {
      const piece = element("span", {className: "calculator-piece"});
      piece.style.cssText = `width: ${100 * size / total}%; background: ${colour}`;
      return piece;
    });
    const drawn = element("div", {className: "calculator-bar"}, ...pieces, line);
    drawn.setAttribute("role", "img");
    drawn.setAttribute("aria-label", words);
    return drawn;
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

  const verdict = (peak, memory) => {
    const share = `${memoryOf(peak)} of ${memoryOf(memory)} on each device`;
    if (peak > memory) return ["no", `Does not fit: ${share}`];
    return peak > 0.8 * memory ? ["tight", `Tight: ${share}`] : ["yes", `Fits: ${share}`];
  };

  const shown = (found, device, devices) => {
    const [kind, words] = verdict(found.peak, device.memory);
    const turn = found.memory.activations + found.memory.logits >= found.memory.gradients;
    const names = ["parameters", "moments", "gathered", "inputs",
                   ...(turn ? ["activations", "logits"] : ["gradients"])];
    const parts = names.map(name => [PARTS[name][1], found.memory[name]]);
    const memory = Object.keys(PARTS).filter(name => found.memory[name]).map(name => {
      const later = names.includes(name) ? "" : turn ? " (when activations are gone)"
        : " (gone when gradients are there)";
      const label = element("span", {}, swatch(PARTS[name][1]), PARTS[name][0] + later);
      return [label, commas(found.memory[name])];
    });
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
      bar(parts, device.memory, `${words}. The dashed line is the device's memory.`),
      table("Memory of a device", ["what", "bytes"], memory),
      table("Work of a step", ["what", "FLOPs"], [
        ["useful, of all devices", flopsOf(found.useful)],
        [`of one of ${devices} devices`, flopsOf(found.flops)],
        ["how often a FLOP is done", `${digits(found.factor)} ×`]]),
      traffic.length ? table("Collectives of a step", 
        ["what", "result bytes per device", "wire bytes per device"], traffic)
        : element("p", {}, "No collectives: nothing is shared."),
      table("Floors of a step", ["limited by", "at least", ""], floors),
      element("p", {}, `No program that keeps its activations in memory takes less than `
        + `${timeOf(slowest)} a step here, because of its `
        + `${longest === "memory" ? "traffic to memory" : longest}. Real ones take longer.`),
    ];
  };

  const build = (home, devices) => {
    const sizes = element("fieldset", {}, element("legend", {}, "Sizes"));
    const names = Object.fromEntries(Object.keys(devices).map(name => [name, name]));
    const form = element("form", {className: "calculator-form"},
      element("fieldset", {}, element("legend", {}, "What and where"),
        field("model", select("model", {ViT: "ViT", MiniGPT: "MiniGPT"})),
        field("preset", select("preset", PRESETS)), field("device", select("device", names)),
        field("rows", number("rows", 4)), field("across", number("across", 2)),
        field("batch", number("batch", 1024))), sizes);
    const output = element("div", {className: "calculator-output"});
    output.setAttribute("aria-live", "polite");
    home.replaceChildren(form, output);

    const fill = chosen => {
      for (const [name, value] of Object.entries({...START, ...chosen}))
        if (form.elements[name]) form.elements[name].value = value;
    };
    const resize = (model, chosen = {}) => {
      sizes.replaceChildren(sizes.firstChild, ...Object.entries(SIZES[model]).map(
        ([name, value]) => field(name, number(name, chosen[name] || value))));
    };
    const read = () => {
      const {model, preset, device, ...numbers} = Object.fromEntries(new FormData(form));
      for (const [name, text] of Object.entries(numbers)) {
        numbers[name] = Number(text);
        if (!Number.isInteger(numbers[name]) || numbers[name] < 1)
          throw new RangeError(`${LABELS[name]} is a whole number from 1; found ${text || "nothing"}`);
      }
      const {rows, across, batch, ...own} = numbers;
      return {model, preset, rows, across, batch, sizes: own, device: devices[device]};
    };
    const update = () => {
      try {
        const choice = read();
        output.replaceChildren(...shown(meshbook.estimate(choice), choice.device,
                                        choice.rows * choice.across));
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
