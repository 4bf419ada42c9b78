// The form of the sharding explorer: it reads the fields, and draws what meshbookExplorer finds.
"use strict";

(() => {
  const {SIZES: MODELS, PRESETS, element, drawn, commas} = meshbookForm;
  const POWERS = [1, 2, 4, 8, 16, 32, 64], MOST = 64;
  const START = {model: "ViT", preset: "tensor_parallel", rows: 4, across: 2, batch: 1024};
  const LABELS = {model: "Model", preset: "Sharding", rows: "Mesh: batch", across: "Mesh: model",
                  batch: "Batch, all devices"};
  const sized = bytes => {
    let [number, at] = [bytes, 0];
    const units = ["B", "kB", "MB", "GB", "TB"];
    while (number >= 1000 && at < units.length - 1) [number, at] = [number / 1000, at + 1];
    return `${at && number < 100 ? number.toFixed(1) : Math.round(number)} ${units[at]}`;
  };
  const [colour, ink] = [0, 1].map(
    at => device => meshbookColours[device % meshbookColours.length][at]);
  const picture = (width, height, label, ...body) =>
    drawn("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label,
                  style: `width:100%;max-width:${width}px;height:auto`}, ...body);
  const square = (x, y, width, height, fill, more = {}) =>
    drawn("rect", {x, y, width, height, fill, ...more});

  // Small squares, one for each device, as large as the tile has room for.
  const chips = (x, y, width, height, devices) => {
    let columns = 1;
    const rows = () => Math.ceil(devices.length / columns);
    while (width / columns > height / rows() && columns < devices.length) columns++;
    const side = Math.min(width / columns, height / rows(), 14);
    return devices.map((device, at) => square(
      x + side * (at % columns) + side * 0.1, y + side * Math.floor(at / columns) + side * 0.1,
      side * 0.8, side * 0.8, colour(device), {"data-device": device}));
  };

  // The tiles of a tensor: its split dimensions downwards and to the right, at most two.
  const tiles = ({spec, letters, shape}, {rows, across}) => {
    const mesh = {batch: rows, model: across};
    const split = spec.flatMap((axis, at) => axis && mesh[axis] > 1 ? [at] : []);
    const down = split.length === 2 || (split[0] === 0 && spec.length > 1) ? split[0] : null;
    const right = split.find(at => at !== down) ?? null;
    const parts = at => at === null ? 1 : mesh[spec[at]];
    const [width, height] = [150, spec.length > 1 ? 64 : 26];
    const [wide, high] = [width / parts(right), height / parts(down)], body = [];
    const devices = Array.from({length: rows * across}, (_, device) => device);
    const place = {batch: device => Math.floor(device / across), model: device => device % across};
    let copies = 0;
    for (let row = 0; row < parts(down); row++)
      for (let column = 0; column < parts(right); column++) {
        const own = devices.filter(device =>
          (down === null || place[spec[down]](device) === row)
          && (right === null || place[spec[right]](device) === column));
        const gap = Math.min(2, wide / 6, high / 6);
        const box = [1 + wide * column, 1 + high * row, wide - gap, high - gap];
        copies = own.length;
        body.push(...own.length === 1
          ? [square(...box, colour(own[0]), {"data-device": own[0]})]
          : [square(...box, "none", {stroke: "currentColor", "stroke-opacity": 0.6}),
             ...chips(box[0] + gap, box[1] + gap, box[2] - 2 * gap, box[3] - 2 * gap, own)]);
      }
    const count = parts(down) * parts(right);
    const words = `${count} piece${count > 1 ? "s" : ""}, each on ${copies} `
      + `device${copies > 1 ? "s" : ""}`;
    return [picture(width + 2, height + 2, words, ...body), words];
  };

  const notation = ({name, letters, spec}) => {
    const dimensions = [...letters].map((letter, at) => spec[at] ? `${letter}_${spec[at]}` : letter);
    return `${name.slice(0, name.lastIndexOf("_"))}[${dimensions.join(", ")}]`;
  };
  const tuple = sizes => `(${sizes.map(commas).join(" × ")})`;
  const spec = names => `P(${names.map(axis => axis ? `"${axis}"` : "None").join(", ")})`;

  const card = (tensor, choice) => {
    const [svg, words] = tiles(tensor, choice);
    return element("li", {className: "explorer-tensor"},
      element("code", {}, notation(tensor)), svg,
      element("span", {}, words), element("span", {}, spec(tensor.spec)),
      element("span", {}, `${tuple(tensor.shape)} → ${tuple(tensor.held)}`),
      element("span", {}, `${commas(tensor.bytes)} bytes per device`));
  };
  const table = (caption, head, rows) => element("div", {className: "explorer-table", tabIndex: 0,
    role: "region", "aria-label": caption}, element("table", {className: "table"},
    element("caption", {}, caption),
    element("thead", {}, element("tr", {}, ...head.map(
      words => element("th", {scope: "col"}, words)))),
    element("tbody", {}, ...rows.map(row => element("tr", {}, ...row.map((cell, at) =>
      element(at ? "td" : "th", at ? {} : {scope: "row"}, cell)))))));

  // Downwards along batch, to the right along model; a tall mesh is turned.
  const meshOf = ({rows, across}) => {
    const turned = rows > 8 && rows > across, body = [];
    const [wide, high] = turned ? [rows, across] : [across, rows];
    const side = Math.min(28, 640 / wide);
    for (let device = 0; device < rows * across; device++) {
      const [row, column] = [Math.floor(device / across), device % across];
      const [x, y] = turned ? [row, column] : [column, row];
      body.push(square(side * x + 1, side * y + 1, side - 2, side - 2, colour(device), {rx: 2}));
      if (side > 20) body.push(drawn("text", {x: side * (x + 0.5), y: side * (y + 0.5) + 4,
        "font-size": 12, "text-anchor": "middle", fill: ink(device)}, device));
    }
    const [right, down] = turned ? ["batch", "model"] : ["model", "batch"];
    return element("figure", {className: "explorer-mesh"},
      picture(side * wide, side * high, `A mesh of ${rows} by ${across} devices`, ...body),
      element("figcaption", {}, `${rows * across} device${rows * across > 1 ? "s" : ""}: `
        + `${down} downwards, ${right} to the right`));
  };

  const NAMES = {embedding: "Embedding", head: "Head and loss", optimizer: "Optimizer"};
  // A bar for each collective of each layer, all blocks together, in the colour of its mesh axis.
  const barsOf = ({exchanges}, {sizes}) => {
    const totals = {}, body = [], told = [];
    for (const {layer, kind, axis, bytes} of exchanges) {
      const [name, times] = layer === "block"
        ? [`All ${sizes.layers} blocks`, sizes.layers] : [NAMES[layer], 1];
      const row = totals[name] ??= {};
      row[`${kind} along ${axis}`] = (row[`${kind} along ${axis}`] ?? 0) + times * bytes;
    }
    const most = Math.max(...Object.values(totals).flatMap(Object.values));
    let y = 0;
    for (const [name, row] of Object.entries(totals)) {
      body.push(drawn("text", {x: 0, y: y + 12, "font-size": 13, "font-weight": 600,
                               fill: "currentColor"}, name));
      for (const [what, bytes] of Object.entries(row)) {
        const wide = Math.max(1, 180 * bytes / most), words = `${sized(bytes)}, ${what}`;
        body.push(square(0, y + 18, wide, 13, meshbookAxes[what.split(" ").at(-1)],
                         {"data-layer": name, "data-what": what, "data-bytes": bytes}),
                  drawn("text", {x: wide + 6, y: y + 29, "font-size": 12, fill: "currentColor"},
                        words));
        told.push(`${name}: ${words}`);
        y += 17;
      }
      y += 20;
    }
    return told.length ? [element("figure", {className: "explorer-mesh"},
      picture(400, y, told.join("; "), ...body),
      element("figcaption", {}, "What each layer communicates in a step: "
        + "bytes of results on each device"))] : [];
  };
  const layerOf = (layer, found, choice) => {
    const own = ({layer: other}) => other === layer;
    const [tensors, moved] = [found.tensors.filter(own), found.exchanges.filter(own)];
    if (!tensors.length && !moved.length) return [];
    const title = layer === "block" ? `One of ${choice.sizes.layers} blocks` : NAMES[layer];
    const cards = some => element("ul", {className: "explorer-tensors"},
      ...some.map(each => card(each, choice)));
    const [parameters, activations] = [true, false].map(
      is => tensors.filter(({isParameter}) => isParameter === is));
    const [vectors, matrices] = [true, false].map(
      is => parameters.filter(({shape}) => (shape.length === 1) === is));
    const small = vectors.reduce((all, {bytes}) => all + bytes, 0);
    return [element("section", {}, element("h3", {}, title),
      ...matrices.length ? [element("h4", {}, "Parameters"), cards(matrices)] : [],
      ...vectors.length ? [element("details", {}, element("summary", {},
        `${vectors.length} vector${vectors.length > 1 ? "s" : ""}: ${commas(small)} bytes per device`),
        cards(vectors))] : [],
      ...activations.length ? [element("h4", {}, "Activations"), cards(activations)] : [],
      moved.length ? table(`${title}: what it communicates in a step`,
        ["what", "collective", "result bytes per device"],
        moved.map(each => [`${each.when}: ${each.what}`,
          `${each.count === null ? "" : `${commas(each.count)} × `}${each.kind} along ${each.axis}`
          + (each.count === null ? ", joined with others" : ""), commas(each.bytes)]))
        : element("p", {}, "It communicates nothing."))];
  };

  const summary = (found, choice) => {
    const wire = found.traffic.reduce((all, each) => all + each.at(-1), 0);
    const devices = choice.rows * choice.across;
    return `${devices > 1 ? `Each of ${devices} devices` : "The device"} holds `
      + `${sized(found.held)} of the ${sized(found.parameters)} of parameters, and `
      + (wire ? `sends ${sized(wire)} in each step.` : "sends nothing.")
      + (choice.preset === "data_parallel" && choice.across > 1
        ? ` Along model, ${choice.across} devices do the same work.` : "");
  };

  const shown = (found, choice) => [
    meshOf(choice), ...barsOf(found, choice),
    ...["embedding", "block", "head", "optimizer"].flatMap(layer => layerOf(layer, found, choice)),
    element("section", {}, element("h3", {}, "The whole step"), found.traffic.length
      ? table("All layers together", ["collective", "result bytes per device",
                                      "wire bytes per device"],
        found.traffic.map(([kind, axis, , wire]) => [`${kind} along ${axis}`,
          commas(found.moved[`${kind} along ${axis}`]), commas(wire)]))
      : element("p", {}, "No collectives: each device works alone."))];

  const build = home => {
    const field = (name, input) => element("label", {className: "calculator-field"},
      element("span", {}, LABELS[name]), input);
    const select = (name, options) => element("select", {name}, ...Object.entries(options).map(
      ([value, words]) => element("option", {value}, words)));
    const powers = Object.fromEntries(POWERS.map(each => [each, each]));
    const names = Object.fromEntries(Object.keys(MODELS).map(each => [each, each]));
    const form = element("form", {className: "explorer-form"},
      field("model", select("model", names)), field("preset", select("preset", PRESETS)),
      field("rows", select("rows", powers)), field("across", select("across", powers)),
      field("batch", element("input", {name: "batch", type: "number", min: 1, step: 1,
                                       inputMode: "numeric"})));
    const verdict = element("p", {className: "calculator-verdict", "aria-live": "polite"});
    const output = element("div", {className: "explorer-output"});
    home.replaceChildren(form, verdict, output);

    const read = () => {
      const {model, preset, ...texts} = Object.fromEntries(new FormData(form));
      const numbers = Object.fromEntries(Object.entries(texts).map(
        ([name, text]) => [name, Number(text)]));
      for (const [name, number] of Object.entries(numbers))
        if (!Number.isInteger(number) || number < 1)
          throw new RangeError(`${LABELS[name]} is a whole number from 1; found `
            + `${texts[name] || "nothing"}`);
      if (numbers.rows * numbers.across > MOST)
        throw new RangeError(`A mesh of ${numbers.rows} by ${numbers.across} has `
          + `${numbers.rows * numbers.across} devices; ${MOST} can be drawn`);
      const device = {flops: 1, memory: 1, bandwidth: 1, links: 1, link: 1}; // no seconds here
      return {model, preset, ...numbers, sizes: MODELS[model], device};
    };
    const update = () => {
      try {
        const choice = read(), found = meshbookExplorer.explore(choice);
        verdict.className = "calculator-verdict calculator-yes";
        verdict.textContent = summary(found, choice);
        output.replaceChildren(...shown(found, choice));
        history.replaceState(null, "", `#${new URLSearchParams(new FormData(form))}`);
      } catch (error) {
        if (!(error instanceof RangeError)) throw error;
        verdict.className = "calculator-verdict calculator-no";
        verdict.textContent = error.message;
        output.replaceChildren();
      }
    };
    const fill = () => {
      const chosen = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
      for (const [name, value] of Object.entries({...START, ...chosen})) {
        const input = form.elements[name];
        if (!input) continue;
        input.value = value;
        if (!input.value) input.value = START[name]; // an option that there is not
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
