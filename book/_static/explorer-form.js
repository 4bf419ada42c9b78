// The form of the sharding explorer: it reads the fields, and draws what costs*.js say.
"use strict";

(() => {
  const {element, drawn, commas} = meshbookForm, {product, sum} = meshbook;
  const {some, picture, square, tiles, meshOf} = meshbookPictures;
  const costs = meshbook.costs(meshbookCosts);
  const {models: MODELS, parts: PARTS} = meshbookCosts.explorer;
  const POWERS = [1, 2, 4, 8, 16, 32, 64], MOST = 64;
  const START = {
    model: "ViT", preset: "tensor_parallel", rows: 4, expert: 1, stage: 1, context: 1, across: 2,
    batch: 1024, microbatches: 1, schedule: "gpipe", method: "ring"};
  const LABELS = {
    model: "Model", preset: "Sharding", rows: "Mesh: batch", expert: "Mesh: expert",
    stage: "Mesh: stage", context: "Mesh: context", across: "Mesh: model",
    batch: "Batch, all devices", microbatches: "Microbatches", schedule: "Schedule of stages",
    method: "Keys of other devices"};
  const FIELDS = { // by axis
    batch: "rows", expert: "expert", stage: "stage", context: "context", model: "across"};

  const sized = bytes => {
    let [number, at] = [bytes, 0];
    const units = ["B", "kB", "MB", "GB", "TB"];
    while (number >= 1000 && at < units.length - 1) [number, at] = [number / 1000, at + 1];
    return `${at && number < 100 ? number.toFixed(1) : Math.round(number)} ${units[at]}`;
  };
  const tuple = sizes => `(${sizes.map(commas).join(" × ")})`;
  const specOf = ({spec}) => `P(${spec.map(axes => axes.length > 1
    ? `(${axes.map(axis => `"${axis}"`).join(", ")})` : axes.length ? `"${axes[0]}"` : "None",
  ).join(", ")})`;
  // others: {what: the tensors of gradients and of moments, which may lie otherwise}
  const card = (tensor, sizes, others = {}) => {
    const [svg, words] = tiles(tensor, sizes), line = text => element("span", {}, text);
    const own = specOf(tensor);
    return element("li", {className: "explorer-tensor"},
      element("code", {}, costs.notation(tensor)), svg, line(words), line(own),
      line(`${tuple(tensor.shape)} → ${tuple(tensor.held)}`),
      line(`${commas(tensor.bytes)} bytes per device`),
      ...tensor.arrays > 1 ? [line(tensor.isParameter ? `${tensor.arrays} such arrays`
        : `in each of ${tensor.arrays} layers`)] : [],
      ...Object.entries(others).filter(([, each]) => specOf(each) !== own).map(
        ([what, each]) => line(`${what}: ${specOf(each)}, ${commas(each.bytes)} bytes`)));
  };
  const table = (caption, head, rows) => element("div", {className: "explorer-table", tabIndex: 0,
    role: "region", "aria-label": caption}, meshbookForm.table(caption, head, rows));

  // What a part is called, with the number of its layers.
  const NAMES = {embedding: "Embedding", stages: "Between stages", head: "Head and loss",
                 optimizer: "Optimizer"};
  const titleOf = (part, {kinds, plan: {stage}}) => {
    const kind = kinds.find(each => each.part === part);
    if (!kind) return NAMES[part];
    const [one, ...more] = part.split(" "), count = kind.layers * stage;
    const words = [count === 1 ? "layer" : one, ...more].join(" ");
    return `${count} ${words}${stage > 1 ? `, ${kind.layers} in each stage` : ""}`;
  };
  const along = ({kind, axes}) => `${kind} along ${axes.join(", ")}`;
  // A bar for each collective of each part, in the colour of the first of its mesh axes.
  const barsOf = (lines, step) => {
    const totals = {}, body = [], told = [];
    for (const each of lines) {
      const row = totals[titleOf(each.part, step)] ??= {};
      row[along(each)] = {axis: each.axes[0], bytes: (row[along(each)]?.bytes ?? 0) + each.bytes};
    }
    const most = Math.max(...Object.values(totals).flatMap(
      row => Object.values(row).map(({bytes}) => bytes)));
    let y = 0;
    for (const [name, row] of Object.entries(totals)) {
      body.push(drawn("text", {x: 0, y: y + 12, "font-size": 13, "font-weight": 600,
                               fill: "currentColor"}, name));
      for (const [what, {axis, bytes}] of Object.entries(row)) {
        const wide = Math.max(1, 120 * bytes / most), words = `${sized(bytes)}, ${what}`;
        body.push(square(0, y + 18, wide, 13, meshbookAxes[axis],
                         {"data-part": name, "data-what": what, "data-bytes": bytes}),
                  drawn("text", {x: wide + 6, y: y + 29, "font-size": 12, fill: "currentColor"},
                        words));
        told.push(`${name}: ${words}`);
        y += 17;
      }
      y += 20;
    }
    return told.length ? [element("figure", {className: "explorer-mesh"},
      picture(400, y, told.join("; "), ...body),
      element("figcaption", {}, "What each part of the model sends in a step: "
        + "bytes of results on each device"))] : [];
  };
  const countOf = count => count ? `${commas(count)} × ` : "";
  const noteOf = count => count === null ? ", number open" : count ? "" : ", joined with others";
  const partOf = (part, found) => {
    const {step, parameters, moments, gradients, activations, lines} = found;
    const cards = (list, ...others) => element("ul", {className: "explorer-tensors"},
      ...list.map(each => card(each, step.plan.mesh, ...others.map(of => of(each)))));
    const [own, made, moved] = [parameters, activations, lines].map(
      list => list.filter(each => each.part === part));
    if (!own.length && !moved.length) return [];
    const elsewhere = each => {
      const at = parameters.indexOf(each);
      return {"gradient": gradients[at], "each moment": moments[at]};
    };
    const [matrices, rest] = [true, false].map(is => own.filter(each => each.isMatrix === is));
    const [many, bytes] = [1, 0].map(is => sum(rest.map(each => each.arrays * (is || each.bytes))));
    const title = titleOf(part, step);
    return [element("section", {}, element("h3", {}, title),
      ...matrices.length ? [element("h4", {}, "Parameters"), cards(matrices, elsewhere)] : [],
      ...rest.length ? [element("details", {}, element("summary", {},
        `${some(many, "array")} beside matrices: ${commas(bytes)} bytes per device`),
        cards(rest, elsewhere))] : [],
      ...made.length ? [element("h4", {}, step.plan.microbatches > 1
        ? "Activations of a microbatch" : "Activations"), cards(made)] : [],
      moved.length ? table(`${title}: what a device sends in a step`,
        ["what", "collective", "result bytes per device"],
        moved.map(each => [`${each.when}: ${each.what}`,
          countOf(each.count) + along(each) + noteOf(each.count), commas(each.bytes)]))
        : element("p", {}, "It sends nothing."))];
  };

  const summary = ({step, parameters, total}) => {
    const {plan: {mesh}, layout: {rules}, numbers: {stored, moments}} = step;
    const wire = sum(total.map(({wire: bytes}) => bytes)), devices = product(Object.values(mesh));
    const whole = sum(parameters.map(({shape, arrays}) => 4 * arrays * product(shape)));
    const isIdle = mesh.model > 1 && !Object.values(rules.activations).flat().includes("model");
    return `${devices > 1 ? `Each of ${devices} devices` : "The device"} holds `
      + `${sized(4 * stored)} of the ${sized(whole)} of parameters`
      + (moments === stored ? "" : ` and ${sized(4 * moments)} of each of Adam's moments`)
      + (wire ? `, and sends ${sized(wire)} in each step.` : ", and sends nothing.")
      + (isIdle ? ` Along model, ${mesh.model} devices do the same work.` : "");
  };
  const shown = found => [
    meshOf(found.step.plan.mesh), ...barsOf(found.lines, found.step),
    ...PARTS.flatMap(part => partOf(part, found)),
    element("section", {}, element("h3", {}, "The whole step"), found.total.length
      ? table("All parts together", ["collective", "result bytes per device",
                                     "wire bytes per device"],
        found.total.map(each => [along(each), commas(each.bytes), commas(each.wire)]))
      : element("p", {}, "No collectives: each device works alone."))];

  // What there is to show of a choice; a RangeError that says why there is nothing.
  const found = ({model, preset, batch, ...fields}) => {
    const {model: kind, sizes, axes} = MODELS[model];
    const mesh = Object.fromEntries(axes.map(axis => [axis, fields[FIELDS[axis]]]));
    const devices = product(Object.values(mesh)), {microbatches, schedule, method} = fields;
    if (devices > MOST) throw new RangeError(
      `A mesh of ${Object.values(mesh).join(" by ")} has ${devices} devices; ${MOST} can be drawn`);
    const plan = costs.planOf({...mesh, rules: preset, ...microbatches && {microbatches},
                               ...schedule && {schedule}, ...method && {method}});
    const step = costs.explored(costs.configOf(kind, sizes), {...plan, mesh}, batch);
    const total = costs.stepTraffic(step, step.config.number).map(each => ({...each,
      wire: costs.wireBytes(each.kind, step.layout.devices(each.axes), each.bytes)}));
    const [parameters, gradients, moments] = ["parameters", "gradients", "moments"].map(
      of => costs.parameters(step, of));
    return {step, total, parameters, gradients, moments,
            activations: costs.activations(step), lines: costs.exchanges(step)};
  };

  const build = home => {
    const field = (name, input) => element("label", {className: "calculator-field"},
      element("span", {}, LABELS[name]), input);
    const option = value => element("option", {value}, String(value).replaceAll("_", " "));
    const select = (name, values) => field(name, element("select", {name}, ...values.map(option)));
    const number = name => field(name, element("input", {
      name, type: "number", min: 1, step: 1, inputMode: "numeric"}));
    const form = element("form", {className: "explorer-form"},
      select("model", Object.keys(MODELS)), select("preset", []),
      ...Object.values(FIELDS).map(name => select(name, POWERS)), number("batch"),
      number("microbatches"), select("schedule", meshbookCosts.schedules),
      select("method", meshbookCosts.methods));
    const verdict = element("p", {className: "calculator-verdict", "aria-live": "polite"});
    const output = element("div", {className: "explorer-output"});
    home.replaceChildren(form, verdict, output);

    // The fields that a choice has: those of its model's axes, and of stages and a context.
    const offer = () => {
      const {model, preset, stage, context, schedule, method} = form.elements;
      const {axes, presets} = MODELS[model.value], before = preset.value;
      preset.replaceChildren(...presets.map(option));
      preset.value = presets.includes(before) ? before : START.preset;
      const has = (input, is) => {
        input.disabled = !is;
        input.closest("label").hidden = !is;
      };
      for (const [axis, name] of Object.entries(FIELDS))
        has(form.elements[name], axes.includes(axis));
      has(schedule, !stage.disabled && stage.value > 1);
      has(method, !context.disabled && context.value > 1);
    };
    const read = () => {
      const chosen = Object.fromEntries(new FormData(form));
      for (const [name, text] of Object.entries(chosen)) {
        if (typeof START[name] === "string") continue;
        chosen[name] = Number(text);
        if (!Number.isInteger(chosen[name]) || chosen[name] < 1) throw new RangeError(
          `${LABELS[name]} is a whole number from 1; found ${text || "nothing"}`);
      }
      return chosen;
    };
    const update = () => {
      offer();
      try {
        const all = found(read());
        verdict.className = "calculator-verdict calculator-yes";
        verdict.textContent = summary(all);
        output.replaceChildren(...shown(all));
        history.replaceState(null, "", `#${new URLSearchParams(new FormData(form))}`);
      } catch (error) {
        if (!(error instanceof RangeError)) throw error;
        verdict.className = "calculator-verdict calculator-no";
        verdict.textContent = error.message;
        output.replaceChildren();
      }
    };
    // An option that there is not is the one of the start; presets follow from the model.
    const fill = () => {
      const chosen = {...START, ...Object.fromEntries(new URLSearchParams(location.hash.slice(1)))};
      for (const name of Object.keys(START)) {
        const input = form.elements[name];
        input.value = chosen[name];
        if (!input.value) input.value = START[name];
        if (name === "model") offer();
      }
      update();
    };
    form.addEventListener("input", update);
    form.addEventListener("submit", event => event.preventDefault());
    addEventListener("hashchange", fill);
    fill();
  };

  const home = document.getElementById("explorer");
  if (home) build(home);
})();
