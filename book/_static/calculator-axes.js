// A decoder over one more axis: meshbook.planning.axis_estimates in JavaScript, for stages, experts
// and context. tests/book/test_calculator_axes.py holds every number to the Python's.
"use strict";

meshbook.axes = (() => {
  const {product, sum, tiled, WIRE} = meshbook;
  const {complete, memory, numbers, weights, ends, flat, vectors} = meshbook.MODELS.Decoder;
  const SEND = {...WIRE, "all-to-all": WIRE["all-gather"], "collective-permute": (k, n) => n};
  const refuse = words => { throw new RangeError(words); };
  const divides = (name, size, parts, what) => {
    if (size % parts) refuse(`${name}=${size} does not divide over ${parts} ${what}`);
  };
  const plain = (c, own) => memory(c, own, 1, 1, "data_parallel");
  const table = (c, ways = 1) => numbers(c, [[1, "VD"]], ways);
  const periods = c => c.layers / c.period;

  // {permutes of a device, bubble, microbatches that are kept}
  const turnsOf = (schedule, p, m) => {
    if (schedule === "gpipe") return {permutes: 2 * (m + p - 1), bubble: (p - 1) / (m + p - 1),
                                      kept: m + p - 1};
    if (schedule === "lockstep") {
      const turns = m + 2 * (p - 1);
      return {permutes: 2 * turns, bubble: (p - 1) / (m + p - 1), kept: 2 * p - 1};
    }
    const slots = schedule === "one_f_one_b" ? 3 * m + 2 * (p - 1)
      : Math.max(3 * m + p - 1, 2 * (m + p) - 1);
    return {permutes: 2 * slots, bubble: 1 - 3 * m / slots, kept: Math.min(m, p)};
  };
  const stages = (c, {rows, across: p, batch, schedule, microbatches: m}) => {
    if (c.remat !== "none")
      refuse(`stages keep what their schedule needs: expected remat='none', found '${c.remat}'`);
    divides("periods of layers", periods(c), p, "stages");
    divides("padded vocabulary", c.padded, p, "stages");
    divides("batch", batch, rows * m, "devices times microbatches");
    const layers = numbers(c, weights(c), 1) - numbers(c, ends(c), 1);
    const each = layers / p + numbers(c, ends(c), p), turns = turnsOf(schedule, p, m);
    const b = batch / rows / m, tokens = b * c.tokens, size = 4 * tokens * c.embed, moved = [];
    if (p > 1) moved.push(
      ["collective-permute", "stage", turns.permutes * size],
      ["all-reduce", "stage", m * (4 * size + 12 * tokens) + 4 * (1 + c.bias) * c.embed]);
    if (rows > 1) moved.push(["all-reduce", "batch", 4 * each]);
    const held = plain(c, b), inputs = plain({...c, remat: "all"}, b).activations / c.layers;
    const one = held.activations / p;
    return [{...held, parameters: 4 * each, moments: 8 * each, gradients: 4 * each,
             gathered: held.gathered / p, inputs: plain(c, batch / rows).inputs,
             activations: schedule === "lockstep" ? turns.kept * inputs + one : turns.kept * one,
             logits: (held.logits - 4 * table(c)) / p + 4 * table(c, p)},
            withSum(moved, ["batch", "stage"], [rows, p], 8), turns.bubble];
  };
  // An all-reduce along all axes that have more than one device, added to one that there is.
  const withSum = (moved, names, sizes, bytes) => {
    const axes = names.filter((_, at) => sizes[at] > 1).join(", ");
    if (!axes) return moved;
    const same = moved.find(([kind, axis]) => kind === "all-reduce" && axis === axes);
    if (same) same[2] += bytes; else moved.push(["all-reduce", axes, bytes]);
    return moved;
  };

  const mlp = (c, hidden) => (2 + c.gated) * c.embed * hidden
    + c.bias * ((1 + c.gated) * hidden + c.embed);
  const experts = (c, {rows, across: n, batch, experts: E, active, shared, capacity}) => {
    if (active > E)
      refuse(`a token goes to 1 to ${E} of ${E} experts; found active=${active}`);
    divides("experts", E, n, "devices");
    divides("batch", batch, rows * n, "devices");
    const b = batch / (rows * n), D = c.embed, F = c.hidden;
    const slots = E * Math.min(c.tokens, Math.ceil(Number((capacity * active * c.tokens / E).toFixed(9))));
    const own = E / n * mlp(c, F), router = D * E + E * c.bias + (shared ? mlp(c, shared) : 0);
    const each = numbers(c, weights(c), 1) + periods(c) * (router + own - mlp(c, F));
    const moved = n === 1 ? [] : [["all-to-all", "expert",
      periods(c) * (c.remat === "none" ? 4 : 6) * 4 * b * slots * D]];
    if (rows > 1) moved.push(["all-reduce", "batch", 4 * periods(c) * own]);
    withSum(moved, ["batch", "expert"], [rows, n], 4 * (each - periods(c) * own + table(c) + 2));
    const held = plain(c, b), more = c.number * (2 * tiled(b * slots, D)
      + (1 + c.gated) * tiled(b * slots, F) + (shared ? 6 * tiled(b * c.tokens, shared) : 0)
      - 6 * tiled(b * c.tokens, F));
    const kept = c.remat === "none" ? periods(c) : 0;
    return [{...held, parameters: 4 * each, moments: 8 * each, gradients: 4 * each,
             layer: held.layer + more, activations: held.activations + kept * more,
             gathered: held.gathered + c.number * kept * (router + own - mlp(c, F))}, moved, null];
  };

  const BLOCK = 512; // tokens of a block of queries, and of one of keys
  const context = (c, {rows, across: n, batch, method}) => {
    divides("batch", batch, rows, "devices");
    if (c.latent) refuse(
      `attention over a context is for keys and values of heads; found latent=${c.latent}`);
    const {H, G, K} = c.of, b = batch / rows, t = c.tokens / n, L = c.layers;
    for (const [name, size] of [["tokens", c.tokens], ...(method === "ulysses" ? [["groups", G]] : [])])
      divides(name, size, n, "devices of the context");
    const [keys, queries] = [G, H].map(heads => 4 * b * t * heads * K);
    const forward = c.remat === "products" || c.remat === "all" ? 2 : 1;
    const sent = {
      ring: [["collective-permute", "context", L * (2 * forward + 4) * (n - 1) * keys]],
      gather: [["all-gather", "context", L * 4 * n * keys],
               ["reduce-scatter", "context", L * 2 * keys]],
      ulysses: [["all-to-all", "context", L * (forward + 1) * 2 * (queries + keys)]],
    };
    const moved = n > 1 ? sent[method] : [];
    const own = numbers(c, [...flat(c, vectors), [1 + c.bias, "D"]], 1);
    const both = rows > 1 && n > 1, all = numbers(c, weights(c), 1) + table(c) + 2;
    withSum(moved, ["batch", "context"], [rows, n], 4 * (all - (both ? own : 0)));
    if (both) for (const axis of ["batch", "context"]) moved.push(["all-reduce", axis, 4 * own]);
    const held = plain({...c, tokens: t, of: {...c.of, T: t}, byRow: true}, b);
    const [tokens, heads] = method === "ulysses" ? [c.tokens, H / n] : [t, H];
    const side = Math.min(BLOCK, tokens);
    return [{...held, layer: held.layer + 16 * b * heads * side * side + 10 * keys,
             activations: held.activations + (c.remat === "all" ? 0 : 4 * L * b * H * t)},
            moved, null];
  };

  const AXES = {stage: stages, expert: experts, context};
  // choice: {axis, sizes, rows, across, batch} and what the axis takes: {schedule, microbatches},
  // {experts, active, capacity} or {method}. Returns {memory, peak, traffic: [kind, axis, result
  // bytes, wire bytes], bubble}.
  const estimate = choice => {
    const {axis, rows, across} = choice, c = complete(choice.sizes);
    const [{layer, ...held}, moved, bubble] = AXES[axis](c, choice);
    const {parameters, moments, inputs, gathered, gradients, activations, logits} = held;
    const size = {batch: rows, [axis]: across, [`batch, ${axis}`]: rows * across};
    return {
      memory: {...held, activations: activations + layer}, bubble,
      peak: parameters + moments + inputs + gathered + activations
        + Math.max(logits, gradients + layer),
      traffic: moved.map(([kind, along, bytes]) => [kind, along, bytes,
                                                    SEND[kind](size[along], bytes)]),
    };
  };
  return {estimate, turnsOf, SEND};
})();
