// The calculator: meshbook.planning.estimates in JavaScript.
// tests/book/test_calculator.py holds every number to the Python's.
"use strict";

const meshbook = (() => {
  const up = (number, step) => Math.ceil(number / step) * step;
  const product = numbers => numbers.reduce((all, each) => all * each, 1);
  const sum = numbers => numbers.reduce((all, each) => all + each, 0);

  // On a TPU an array (..., rows, columns) takes tiles of 8 rows by 128 columns.
  const tiled = (...shape) =>
    product(shape.slice(0, -2)) * up(shape.at(-2), 8) * up(shape.at(-1), 128);

  const tokenRows = (batch, tokens, width) =>
    Math.min(batch, tokens) * tiled(Math.max(batch, tokens), width);

  // With dropout: MiniGPT drops units twice in D, the ViT in F and in D.
  const blockActivations = ({tokens: T, embed: D, hidden, heads, padded}, batch, ways) => {
    const [F, H] = [hidden / ways, heads / ways];
    const own = 4 * tiled(H, T, T) + 2 * 4 * tiled(D / ways, T) + 4 * 2 * tiled(H, T);
    const masks = tokenRows(batch, T, padded ? D : F) + tokenRows(batch, T, D);
    return 4 * tokenRows(batch, T, F) + batch * own + 4 * 2 * tokenRows(batch, T, D) + masks;
  };

  // What comes into a block: all that it keeps when it is checkpointed.
  const blockInputs = ({tokens, embed}, batch) => 4 * tokenRows(batch, tokens, embed);

  // What one of k devices sends over its links, for n bytes of a collective's result on it.
  const WIRE = {
    "all-reduce": (k, n) => 2 * n * (k - 1) / k, "all-gather": (k, n) => n * (k - 1) / k,
    "reduce-scatter": (k, n) => n * (k - 1),
  };

  const total = ({layers}, {embed, block, head}) => embed + layers * block + head;

  const vit = {
    complete: sizes => ({...sizes, tokens: (sizes.image / sizes.patch) ** 2 + 1}),
    parts(c, ways, rows) {
      const [X, D, F, C] = [3 * c.patch ** 2, c.embed, c.hidden, c.classes];
      const block = (4 * D * D + 2 * D * F) / ways + 6 * D;
      return {embed: (X * D + D + D + c.tokens * D) / rows,
              block: block / rows + (3 * D + F) / ways, head: (2 * D + D * C) / rows + C};
    },
    work(c, images, ways) {
      const [X, T, D, F] = [3 * c.patch ** 2, c.tokens, c.embed, c.hidden];
      const blocks = 3 * c.layers * (T * (8 * D * D + 4 * D * F) + 4 * T * T * D);
      const whole = 2 * (T - 1) * 2 * X * D + 3 * 2 * D * c.classes;
      return [images * (blocks + whole), (blocks + ways * whole) / (blocks + whole)];
    },
    traffic: (c, images, rows, ways) => ({
      model: 4 * 4 * c.layers * images * c.tokens * c.embed,
      batch: 4 * (total(c, vit.parts(c, ways, 1)) - c.embed + 2),
    }),
    inputs: (c, images) => 4 * images * c.image ** 2 * 3,
    logits: (c, images) => 4 * tiled(images, c.classes) + 4 * vit.parts(c, 1, 1).head,
  };

  const gpt = {
    complete: sizes => ({...sizes, padded: up(sizes.vocabulary, 128)}),
    parts(c, ways, rows) {
      const [D, F, V] = [c.embed, c.hidden, c.padded];
      const block = (4 * D * D + 2 * D * F) / ways + 6 * D;
      return {embed: (c.tokens * D + V * D / ways) / rows,
              block: block / rows + (3 * D + F) / ways, head: V * D / ways / rows + V / ways};
    },
    work(c, batch) {
      const [T, D, F] = [c.tokens, c.embed, c.hidden];
      const blocks = c.layers * (T * (8 * D * D + 4 * D * F) + 4 * T * T * D);
      const head = 2 * T * D * c.vocabulary;
      return [3 * batch * (blocks + head), (blocks + 2 * T * D * c.padded) / (blocks + head)];
    },
    traffic(c, batch, rows, ways, sharded) {
      const [tokens, L] = [batch * c.tokens, c.layers];
      return {
        model: 4 * (tokens * c.embed * (1 + 4 * L + 1) + 3 * tokens + 6 * L + 3),
        batch: 4 * (total(c, gpt.parts(c, ways, 1)) + 2 + (sharded ? 10 * L + 3 : 0)),
      };
    },
    inputs: (c, batch) => 4 * 2 * tiled(batch, c.tokens),
    logits: (c, batch, ways) => 2 * tiled(Math.min(512, batch * c.tokens), c.padded / ways)
      + 4 * tiled(c.embed, c.padded / ways),
  };

  const MODELS = {ViT: vit, MiniGPT: gpt};

  const check = (c, {batch, rows, across, preset, ways, shards}) => {
    const sizes = [
      ["batch", batch, rows, "batch"], ["heads", c.heads, ways, "model"],
      ["hidden", c.hidden, ways, "model"], ["embed", c.embed, shards, "batch"],
      ["embed", c.embed, c.heads, null],
    ];
    if (c.padded) sizes.push(["padded vocabulary", c.padded, ways, "model"]);
    if (c.groups) sizes.push(["groups", c.groups, ways, "model"]);
    if (preset === "sequence_parallel") sizes.push(["tokens", c.tokens, ways, "model"]);
    if (c.image) sizes.push(["image", c.image, c.patch, null]);
    for (const [name, size, parts, axis] of sizes)
      if (size % parts)
        throw new RangeError(axis
          ? `${name}=${size} does not divide over mesh axis '${axis}' of size ${parts}`
          : `${name}=${size} is not a multiple of ${name === "image" ? "patch" : "heads"}=${parts}`);
  };

  const KINDS = ["parameters", "moments", "inputs", "gathered", "gradients", "activations",
                 "logits"];

  // The moments of a step, as in meshbook.planning.memory_timeline: [{phase, block, held}].
  const timeline = (c, memory, own, whole, block, kept) => {
    const {parameters, moments, inputs, gathered, gradients, logits} = memory;
    const L = c.layers, upTo = (from, length) => Array.from({length}, (_, at) => from + at);
    const moment = (phase, at, more) => {
      const held = {parameters, moments, inputs, ...more};
      return {phase, block: at, held: Object.fromEntries(KINDS.map(kind => [kind, held[kind] ?? 0]))};
    };
    const forward = upTo(0, L + 1).map(at => moment("forward", at, {
      gathered: whole.embed + at * whole.block, activations: at * kept}));
    const backward = upTo(1, L).reverse().map(at => moment("backward", at, {
      gathered, gradients: 4 * (own.head + (L - at) * own.block),
      activations: (at - 1) * kept + block}));
    return [...forward, moment("loss", null, {gathered, activations: L * kept, logits}), ...backward,
            moment("backward", 0, {gathered, gradients}), moment("update", null, {gradients})];
  };

  // choice: {model, sizes, preset, rows, across, batch, checkpointed, device: {flops, memory,
  // bandwidth, links, link}}; traffic: [kind, axis, result bytes, wire bytes]
  const estimate = choice => {
    const {model, preset, rows, across, batch, checkpointed, device} = choice;
    const of = MODELS[model], c = of.complete(choice.sizes);
    const ways = preset === "data_parallel" ? 1 : across;
    const shards = /^(fully|zero)/.test(preset) ? rows : 1;
    check(c, {batch, rows, across, preset, ways, shards});
    if (of.estimate) return finish(of.estimate(c, choice), choice, ways);
    const own = batch / rows;
    const parts = of.parts(c, ways, shards), all = of.parts(c, ways, 1);
    // What is split along "batch" is gathered whole, in bfloat16.
    const whole = Object.fromEntries(Object.keys(parts).map(name => [
      name, shards === 1 ? 0 : 2 * (all[name] - parts[name]) * shards / (shards - 1)]));
    const parameters = 4 * total(c, parts), gathered = total(c, whole);
    const block = blockActivations(c, own, ways);
    const kept = checkpointed ? blockInputs(c, own) : block;
    const memory = {
      parameters, moments: 2 * parameters, gradients: parameters, gathered,
      inputs: of.inputs(c, own), activations: (c.layers - 1) * kept + block,
      logits: of.logits(c, own, ways),
    };
    const moments = timeline(c, memory, parts, whole, block, kept);
    const [useful, once] = of.work(c, batch, ways);
    const factor = once * across / ways;
    const flops = useful * factor / (rows * across);
    const sent = of.traffic(c, own, rows, ways, shards > 1);
    const traffic = [];
    if (ways > 1) traffic.push(["all-reduce", "model", sent.model]);
    if (rows > 1) traffic.push(["all-reduce", "batch", sent.batch]);
    if (shards > 1) traffic.push(["all-gather", "batch", 2 * gathered]);
    // A compiler can gather in bfloat16, and reduce the gradients in pieces.
    const least = shards === 1 ? traffic : [
      ...traffic.filter(([, axis]) => axis === "model"),
      ["all-gather", "batch", gathered], ["reduce-scatter", "batch", 2 * gathered / rows]];
    const through = 2 * (c.layers * kept + (gathered || parameters)) + 8 * parameters;
    return finish({memory, timeline: moments, useful, factor, flops, moved: traffic, least, through},
                  choice, ways);
  };

  // Seconds that one device needs at least to multiply, to use its memory, and to use its links.
  const floors = (device, flops, bytes, wire) => ({
    compute: flops / device.flops, memory: bytes / device.bandwidth,
    interconnect: wire / (device.links * device.link)});

  const finish = ({moved, least, through, ...found}, {rows, device}, ways) => {
    const size = {model: ways, batch: rows, "batch, model": rows * ways};
    const wire = ([kind, axis, bytes]) => WIRE[kind](size[axis], bytes);
    return {
      ...found, peak: Math.max(...found.timeline.map(({held}) => sum(Object.values(held)))),
      traffic: moved.map(each => [...each, wire(each)]),
      floors: floors(device, found.flops, through, sum(least.map(wire))),
    };
  };

  return {estimate, floors, WIRE, MODELS, KINDS, up, product, sum, tiled, tokenRows};
})();
