// The form around meshbook.estimate and, for one more axis of a decoder, meshbook.axes.estimate: it
// reads the fields, and writes what a step needs.
"use strict";

(() => {
  const PARTS = meshbookParts; // {kind of memory: [words, colour]}, from the bottom upwards
  const {element, commas, digits, scaled, memoryOf, timeOf, table} = meshbookForm;
  const {timeline, whole} = meshbookTimeline, limits = meshbookLimits;
  const said = sentences => sentences.map(words => element("p", {className: "calculator-said"}, words));
  const DECODER = {
    vocabulary: 50257, tokens: 256, embed: 256, hidden: 512, heads: 8, groups: 0, latent: 0,
    rotary: 0, layers: 4, period: 1, gated: 1, bias: 0, byRow: 0, number: 4, remat: "none",
    experts: 0, active: 2, shared: 0, capacity: 1.25,
  };
  const SIZES = {
    ...meshbookForm.SIZES, Decoder: DECODER,
    JAXformer: {...DECODER, vocabulary: 100277, tokens: 1024, embed: 768, hidden: 3072, heads: 12,
                latent: 128, rotary: 128, layers: 48, period: 6, gated: 0, bias: 1, byRow: 1,
                number: 2, remat: "all", experts: 16, shared: 768, capacity: 1.5},
  };
  const ROUTED = ["experts", "active", "shared", "capacity"]; // sizes that experts have
  const READY = { // what goes with a model that is chosen
    JAXformer: {device: "TPU v4", slice: "2x4x4", preset: "fully_sharded_kept", rows: 32, across: 1,
                batch: 256},
  };
  const MODELS = {ViT: "ViT", MiniGPT: "MiniGPT", Decoder: "decoder", JAXformer: "JAXformer"};
  const MORE_PRESETS = {
    sequence_parallel: "sequence parallel", zero1: "ZeRO-1", zero2: "ZeRO-2",
    fully_sharded_kept: "ZeRO-3",
    fully_sharded_again: "ZeRO-3, regather",
  };
  const AXES = { // what the second axis of the mesh is then for, and the fields that it needs
    stage: ["pipeline stages", "schedule", "microbatches"],
    expert: ["experts"], context: ["split context", "method"],
  };
  const CHOICES = {
    schedule: {gpipe: "GPipe", lockstep: "1F1B, lockstep", one_f_one_b: "1F1B, slots",
               zero_bubble: "ZB-H1, slots"},
    method: {ring: "ring", gather: "gathered", ulysses: "Ulysses"},
  };
  const presetsOf = model => "remat" in SIZES[model]
    ? {...meshbookForm.PRESETS, ...MORE_PRESETS, ...Object.fromEntries(Object.entries(AXES).map(
      ([axis, [words]]) => [axis, words]))} : meshbookForm.PRESETS;
  const ACTIVATIONS = {kept: "all kept", checkpointed: "checkpointed"};
  const OPTIONS = { // sizes that are chosen from these
    gated: {1: "SwiGLU", 0: "GELU"}, bias: {0: "none", 1: "everywhere"},
    byRow: {0: "of all rows", 1: "row by row"},
    number: {4: "float32", 2: "bfloat16"},
    remat: {none: "everything", products: "products", attention: "attention",
            all: "its input"},
  };
  const OR_NONE = ["groups", "latent", "rotary", "experts", "shared"]; // may be 0
  const LABELS = {
    image: "Image side, pixels", patch: "Patch side, pixels", classes: "Classes C",
    vocabulary: "Vocabulary", tokens: "Tokens T", embed: "Embed D", hidden: "Hidden F",
    heads: "Heads H", layers: "Layers L", batch: "Batch, all devices",
    rows: "Mesh: batch", across: "Mesh: model", preset: "Sharding", device: "Device", model: "Model",
    activations: "Activations", groups: "Groups, or 0",
    latent: "Latent R, or 0", rotary: "Rotary P", period: "Period",
    gated: "MLP", bias: "Biases", number: "Activations in", remat: "Kept of a layer",
    byRow: "Attention", schedule: "Schedule", microbatches: "Micro\u00adbatches m",
    experts: "Experts E, or 0", active: "Experts of a token", shared: "Shared expert, or 0",
    capacity: "Capacity factor", method: "Keys and values", slice: "Chips to rank",
  };
  const START = {model: "ViT", device: "TPU v5e", preset: "tensor_parallel", rows: 4, across: 2,
                 batch: 8192, activations: "kept", microbatches: 8};

  const flopsOf = flops => scaled(flops, ["FLOPs", "kFLOPs", "MFLOPs", "GFLOPs", "TFLOPs",
                                          "PFLOPs"], 1000);

  const field = (name, input) =>
    element("label", {className: "calculator-field"}, element("span", {}, LABELS[name]), input);
  const select = (name, options) => element("select", {name}, ...Object.entries(options).map(
    ([value, words]) => element("option", {value}, words)));
  const number = (name, value, min = 1) =>
    element("input", {name, value, type: "number", min, step: 1, inputMode: "numeric"});

  const place = ({phase, block}) => block === null ? `in the ${phase}`
    : `in the ${phase} pass of ${block ? `block ${block}` : "the embedding"}`;
  const swatch = colour => {
    const made = element("span", {className: "calculator-swatch"});
    made.style.background = colour;
    return made;
  };

  // A compiler needs more than the formula: the page says how much.
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

  const shown = (found, choice) => {
    const {device, sizes, checkpointed, rows, across} = choice;
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
      ...said(limits.ofMemory(choice)),
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
      element("p", {}, `A step that keeps ${keepsLess ? "what this one keeps" : "its activations"} in `
        + `memory, and does the work counted here, takes at least ${timeOf(slowest)}, because of its `
        + `${longest === "memory" ? "traffic to memory" : longest}. A real one takes longer.`),
      ...said([...limits.ofWork(choice), ...limits.ofLinks(choice)]),
    ];
  };

  // All meshes of as many devices, each with its best preset; the one that is chosen is marked.
  const shownMeshes = choice => {
    const {model, rows, across, preset} = choice, names = presetsOf(model);
    const {found, refused} = meshbook.ranking.meshes(choice, rows * across);
    const mine = each => each.rows !== rows || each.across !== across ? ""
      : each.preset === preset ? ", chosen" : ", the chosen mesh with another sharding";
    return [
      table(`All meshes of ${rows * across} devices`, ["batch, model", "memory", "floors, summed"],
        found.map(each => [
          `(${each.rows}, ${each.across}) ${names[each.preset]}${mine(each)}`,
          `${memoryOf(each.found.peak)}${each.fits ? "" : ", no"}`, timeOf(each.seconds)])),
      element("p", {}, limits.ORDER),
      ...refused.map(([[one, other], why]) => element("p", {}, `(${one}, ${other}): ${why}`)),
    ];
  };

  // Of stages the formula counts what a schedule has to keep: a program keeps more.
  const shownAlong = ({memory, peak, traffic, bubble}, choice) => {
    const {device, axis} = choice;
    const [kind, words] = verdict(peak, device.memory, false), least = axis === "stage";
    const kinds = Object.keys(PARTS).filter(kind => memory[kind]).reverse();
    const rows = traffic.map(([what, along, result, wire]) => [
      `${what} along ${along}`, commas(result), commas(wire)]);
    return [
      element("p", {className: `calculator-verdict calculator-${least && kind === "yes" ? "tight" : kind}`},
        least ? words.replace(/^(Fits|Tight): /, "Needs at least ") : words),
      ...(least ? [element("p", {}, `Bubble: ${digits(100 * bubble)}% of the time of each `
        + "device.")] : []),
      ...said([...limits.ofMemory(choice), ...limits.ofLinks(choice)]),
      table("Memory of each device", ["what", "bytes at most", ""], kinds.map(kind => [
        element("span", {}, swatch(PARTS[kind][1]), PARTS[kind][0]), commas(memory[kind]),
        memoryOf(memory[kind])])),
      rows.length ? table("Collectives of a step",
        ["what", "result bytes per device", "wire bytes per device"], rows)
        : element("p", {}, "This step has no collectives."),
    ];
  };

  const build = (home, devices) => {
    const sizes = element("fieldset", {}, element("legend", {}, "Sizes"));
    const routed = element("fieldset", {}, element("legend", {}, "Experts"));
    const names = Object.fromEntries(Object.keys(devices).map(name => [name, name]));
    const form = element("form", {className: "calculator-form"},
      element("fieldset", {}, element("legend", {}, "What and where"),
        field("model", select("model", MODELS)),
        field("preset", select("preset", {})), field("device", select("device", names)),
        field("rows", number("rows", 4)), field("across", number("across", 2)),
        field("batch", number("batch", 1024)), field("slice", select("slice", {})),
        ...Object.values(AXES).flatMap(([, ...fields]) => fields.map(name => field(name,
          CHOICES[name] ? select(name, CHOICES[name]) : number(name, START[name])))),
        field("activations", select("activations", ACTIVATIONS))), sizes, routed);
    const output = element("div", {className: "calculator-output"});
    output.setAttribute("aria-live", "polite");
    const ranking = element("div", {className: "calculator-ranking"});
    const showPlans = meshbookPlans.into(ranking);
    home.replaceChildren(form, output, ranking);

    const fill = chosen => {
      for (const [name, value] of Object.entries(chosen))
        if (form.elements[name]) form.elements[name].value = value;
    };
    // The fields that a model has: its sizes, its presets, what is kept.
    const resize = (model, chosen = {}) => {
      const made = Object.entries(SIZES[model]).map(([name, value]) => {
          const input = OPTIONS[name] ? select(name, OPTIONS[name])
            : number(name, chosen[name] || value, OR_NONE.includes(name) ? 0 : 1);
          if (OPTIONS[name]) input.value = chosen[name] in OPTIONS[name] ? chosen[name] : value;
          if (name === "capacity") input.step = "any";
          return [name, field(name, input)];
        });
      for (const [home, isRouted] of [[sizes, false], [routed, true]])
        home.replaceChildren(home.firstChild, ...made.filter(
          ([name]) => ROUTED.includes(name) === isRouted).map(([, each]) => each));
      routed.hidden = !("experts" in SIZES[model]);
      const preset = form.elements.preset, before = preset.value || START.preset;
      const presets = presetsOf(model);
      preset.replaceChildren(...Object.entries(presets).map(
        ([value, words]) => element("option", {value}, words)));
      preset.value = before in presets ? before : START.preset;
      const activations = form.elements.activations;
      activations.disabled = activations.parentNode.hidden = "remat" in SIZES[model];
    };
    // The fields of the axis that is chosen.
    const settle = wanted => {
      const chosen = form.elements.preset.value;
      for (const [axis, [, ...fields]] of Object.entries(AXES))
        for (const name of fields) {
          const input = form.elements[name];
          input.disabled = input.parentNode.hidden = axis !== chosen;
        }
      form.elements.across.parentNode.firstChild.textContent =
        chosen in AXES ? `Mesh: ${chosen}` : LABELS.across;
      const {slice, device, model} = form.elements;
      meshbookPlans.offer(slice, "experts" in SIZES[model.value] ? device.value : "", wanted);
    };
    const read = () => {
      const {model, preset, device, activations, remat, schedule, method, slice, ...numbers} =
        Object.fromEntries(new FormData(form));
      for (const [name, text] of Object.entries(numbers)) {
        numbers[name] = text === "" ? NaN : Number(text);
        const isNeeded = name === "experts" && preset === "expert";
        const least = !isNeeded && (OR_NONE.includes(name) || OPTIONS[name]) ? 0 : 1;
        if (name === "capacity") {
          if (numbers[name] > 0) continue;
          throw new RangeError(`${LABELS[name]} is a number above 0; found ${text || "nothing"}`);
        }
        if (!Number.isInteger(numbers[name]) || numbers[name] < least)
          throw new RangeError(
            `${LABELS[name].replace(", or 0", "")} is a whole number from ${least}; found `
            + `${text || "nothing"}`);
      }
      const {rows, across, batch, microbatches, experts, active, shared, capacity, ...own} = numbers;
      const sizes = {...own, remat}, decoder = slice && meshbookPlans.decoder(sizes, numbers);
      return {model, preset, rows, across, batch, sizes, device: devices[device], decoder,
              checkpointed: activations === "checkpointed",
              axis: preset, schedule, method, microbatches, experts, active, shared, capacity, slice};
    };
    const update = () => {
      let choice = {};
      try {
        choice = read();
        output.replaceChildren(...(choice.experts && choice.preset !== "expert" ? [element(
          "p", {}, "Counted without the experts; the ranking below has them.")] : []),
        ...(choice.preset in AXES ? shownAlong(meshbook.axes.estimate(choice), choice)
          : [...shown(meshbook.estimate(choice), choice),
             ...(choice.slice && !limits.ofRanking(choice).length ? [] : shownMeshes(choice))]),
        ...said(limits.ofRanking(choice)));
        history.replaceState(null, "", `#${new URLSearchParams(new FormData(form))}`);
      } catch (error) {
        if (!(error instanceof RangeError)) throw error;
        output.replaceChildren(element("p", {className: "calculator-verdict calculator-no"},
                                       error.message));
      }
      showPlans(choice);
    };
    const chosen = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
    const model = SIZES[chosen.model] ? chosen.model : START.model;
    resize(model, chosen);
    fill({...START, ...chosen, model});
    settle(chosen.slice);
    form.addEventListener("input", event => {
      const ready = event.target.name === "model" ? READY[event.target.value] ?? {} : {};
      if (event.target.name === "model") resize(event.target.value);
      fill(ready);
      settle(ready.slice);
      update();
    });
    form.addEventListener("submit", event => event.preventDefault());
    update();
  };

  const home = document.getElementById("calculator");
  if (home) build(home, meshbookDevices);
})();
