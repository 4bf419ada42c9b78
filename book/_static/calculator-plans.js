// What a plan for a decoder costs: meshbook.planning.mesh_costs and mesh_steps in JavaScript.
// tests/book/test_calculator_plans.py holds every number to the Python's.
"use strict";

meshbook.plans = (() => {
  const {product, sum, tiled} = meshbook, {turnsOf, SEND} = meshbook.axes;
  const {complete, waiting, sizeOf, parts, matrices, vectors, ends} = meshbook.MODELS.Decoder;
  const AXES = ["batch", "expert", "stage", "context", "model"];
  const PLACES = {E: "expert", H: "model", G: "model", F: "model", M: "model", V: "model"};
  const LOADS = 4; // numbers of an expert that a layer sums
  const [SIDE, DRAWN, LANES, CHUNK] = [128, 32, 4096, 512];
  const isFullySharded = plan => plan.rules.startsWith("fully_sharded");

  // A decoder's sizes with what its formulas ask for again and again: `once` keeps what it finds.
  // experts: null, or {count, active, shared, capacity, auxiliary, biased}.
  const decoder = (sizes, experts) => {
    const c = {...complete(sizes), experts}, found = new Map();
    if (experts && experts.active > experts.count)
      throw new RangeError(`a token goes to 1 to ${experts.count} of ${experts.count} experts; `
        + `found active=${experts.active}`);
    c.once = (key, make) => {
      if (!found.has(key)) found.set(key, make());
      return found.get(key);
    };
    if (experts) Object.assign(c.of, {E: experts.count, C: experts.count, M: experts.shared});
    c.layered = c.kinds.map(([count, positions], at) =>
      [count, positions, Boolean(experts) && at === c.kinds.length - 1]);
    c.weights = [...ends(c).map(each => [...each, false]), ...c.layered.flatMap(
      ([count, ...kind]) => layer(c, ...kind).map(([each, letters]) => [count * each, letters, true]))];
    c.slots = experts ? experts.count * capacity(c.tokens, experts) : 0;
    return c;
  };
  // The slots of an expert for a row.
  const capacity = (tokens, {capacity: factor, active, count}) => {
    const slots = Math.ceil(Number((factor * active * tokens / count).toFixed(9)));
    if (slots < 1)
      throw new RangeError(`expected a capacity of 1 or more slots; found ${slots}, a factor of `
        + `${factor} for ${active} choices of ${tokens} tokens and ${count} experts`);
    return Math.min(slots, tokens);
  };
  // The weights of a layer; those of experts stand in the place of its MLP's.
  const layer = (c, positions, routed) => {
    const all = [matrices(c, positions), vectors(c, positions)];
    if (!routed) return all.flat();
    const [first, {shared, biased}] = [1 + c.gated, c.experts];
    const dense = [all[0].slice(0, -2), c.bias ? all[1].slice(0, -2) : all[1]].flat();
    const experts = [[1, "DC"], [first, "EDF"], [1, "EFD"],
                     ...(c.bias ? [[1, "C"], [first, "EF"], [1, "ED"]] : [])];
    const common = [[first, "DM"], [1, "MD"], ...(c.bias ? [[first, "M"], [1, "D"]] : [])];
    return [...dense, ...experts, ...(shared ? common : []), ...(biased ? [[1, "C"]] : [])];
  };
  const onMesh = plan => `${plan.batch} ${plan.expert} ${plan.stage} ${plan.model}`;

  const ownNumbers = (c, plan, [count, letters, layered]) => {
    const axes = new Set([...letters].filter(x => x in PLACES).map(x => PLACES[x]));
    const stages = layered || letters.includes("V") ? plan.stage : 1;
    return Math.floor(Math.floor(count * product([...letters].map(x => c.of[x]))
      / product([...axes].map(axis => plan[axis]))) / stages);
  };
  // [[has a D, an E, a V, is in the layers], numbers that one device uses]
  const ownGroups = (c, plan) => c.once(`groups ${onMesh(plan)}`, () => {
    const found = new Map();
    for (const weight of c.weights) {
      const key = [..."DEV"].map(x => weight[1].includes(x)).concat(weight[2]);
      const [, before] = found.get(`${key}`) ?? [key, 0];
      found.set(`${key}`, [key, before + ownNumbers(c, plan, weight)]);
    }
    return [...found.values()];
  });
  const ownParameters = (c, plan, rows) => c.once(`own ${rows} ${onMesh(plan)}`, () =>
    sum(ownGroups(c, plan).map(([[hasD], count]) => Math.floor(count / (hasD ? rows : 1)))));
  const stored = (c, plan) => ownParameters(c, plan, isFullySharded(plan) ? plan.batch : 1);
  const used = (c, plan) => ownParameters(c, plan, 1);
  const microbatch = (plan, rows) => rows / plan.batch / plan.expert / plan.microbatches;
  const turns = plan => turnsOf(plan.schedule, plan.stage, plan.microbatches);

  // (kind, axes, bytes) of all that travels because of the rows
  const ofTokens = (c, plan, rows, send) => {
    const {microbatches: m, stage: p, remat, schedule} = plan, {number: n, embed: D, experts: e} = c;
    const tokens = microbatch(plan, rows) * c.tokens, periods = c.layers / c.period;
    const u = n * tokens * D, kept = p > 1 && remat === "products" ? "attention" : remat;
    let [times, again] = [m, Number(remat !== "none")];
    if (p > 1) {
      const {permutes} = turns(plan);
      times = schedule === "gpipe" ? permutes / 2 : m;
      again += schedule === "lockstep";
      send("collective-permute", ["stage"], permutes * u);
      send("all-reduce", ["stage"], 2 * m * u + 4 * (1 + c.bias) * D);
      send("all-reduce", ["batch", "expert", "stage"], 8);
    }
    if (plan.model > 1) {
      const more = ["attention", "all"].includes(kept) ? 1 : 0;
      let sums = tokens * n * sum(c.kinds.map(([layers, positions]) => layers * ((3 + more) * D
        + (c.latent ? 2 * c.latent + (positions ? c.rotary : 0) : D))));
      if (e) sums += periods * (tokens * (n * 2 * D + 4 * e.active)
        + 4 * Math.floor(c.bias * e.count / plan.expert) * D);
      send("all-reduce", ["model"], Math.floor(times * sums / p));
    }
    send("all-reduce", ["stage", "model"], m * (2 * u + 12 * tokens));
    if (!e) return;
    const slots = n * microbatch(plan, rows) * c.slots * D, each = Math.floor(times * periods / p);
    send("all-to-all", ["expert"], each * (4 + 2 * again) * slots);
    const scores = p > 1 ? Number(Boolean(e.auxiliary || e.biased)) : LOADS + again;
    send("all-reduce", ["batch", "expert"], each * 4 * scores * e.count);
  };
  // Numbers that a device's layers gather again in the backward pass.
  const again = (c, plan) => c.once(`again ${plan.remat} ${onMesh(plan)}`, () => {
    const layers = c.weights.filter(([, letters, layered]) => layered && letters.includes("D"));
    const numbers = list => sum(list.map(each => ownNumbers(c, plan, each)));
    if (plan.remat !== "none") return numbers(layers) - c.bias * c.layers * c.embed;
    return numbers(layers.filter(([, x]) => x.length > 1 && x !== "ED")) + 2 * c.layers * c.embed;
  });
  // The same of weights and their gradients, along the axes that split the rows.
  const ofWeights = (c, plan, send) => {
    const {microbatches: m, batch, rules, stage} = plan, n = c.number;
    const byHand = rules !== "tensor_parallel";
    const times = isFullySharded(plan) && stage === 1 ? m : 1;
    if (stage === 1) {
      send("all-reduce", ["batch", "expert"], 8 * (c.experts ? Math.min(m, 2) : 1));
      if (rules === "fully_sharded_again")
        send("all-gather", ["batch"], times * n * again(c, plan));
    }
    for (const [[hasD, hasE, hasV, layered], q] of ownGroups(c, plan)) {
      const axes = hasE ? ["batch"] : ["batch", "expert"];
      if (!byHand || !hasD) {
        const twice = hasV && stage === 1 && m === 1 && !byHand;
        send("all-reduce", axes, 4 * q * (1 + twice));
        continue;
      }
      const pieces = Math.floor(times * 4 * q / batch);
      if (batch > 1) {
        send("all-gather", ["batch"], (layered ? times : 1) * n * q);
        send("reduce-scatter", ["batch"], pieces);
      }
      send("all-reduce", axes.slice(1), pieces);
    }
  };
  // [[kind, axes, result bytes]] of a step
  const traffic = (c, plan, rows) => {
    const moved = new Map();
    const send = (kind, along, bytes) => {
      const axes = along.filter(axis => plan[axis] > 1);
      if (!axes.length) return;
      const key = `${kind} ${axes}`, before = moved.get(key);
      if (before) before[2] += bytes; else moved.set(key, [kind, axes, bytes]);
    };
    ofTokens(c, plan, rows, send);
    ofWeights(c, plan, send);
    return [...moved.values()].filter(([,, bytes]) => bytes);
  };

  // How often a layer goes [forward, through what is done again, backward] for a microbatch.
  const passesOf = plan => {
    if (plan.stage === 1) return [1, 1, 1];
    const times = turns(plan).permutes / 2 / plan.microbatches;
    const some = (plan.microbatches + plan.stage - 1) / plan.microbatches;
    if (plan.schedule === "lockstep") return [2 * some, some, some];
    const each = plan.schedule === "zero_bubble" ? times / 3 : times;
    return [each, each, each];
  };
  const slotsOf = plan => plan.stage === 1 || plan.schedule !== "zero_bubble" ? 0
    : turns(plan).permutes / 2 / plan.microbatches;

  // {what: FLOPs} of a layer's products forward, for a token, by all devices along "model".
  const productsOf = (c, positions, routed, ways) => {
    const found = {}, e = c.experts, turned = positions && c.latent ? c.rotary : 0;
    for (const [count, letters] of matrices(c, positions)) {
      const times = /[HGFV]/.test(letters) ? 1 : ways;
      found[letters] = (found[letters] ?? 0)
        + 2 * count * times * product([...letters].map(x => c.of[x]));
    }
    found.scores = 2 * c.tokens * (c.embed + c.heads * turned);
    found.values = 2 * c.tokens * c.embed;
    if (!routed) return found;
    delete found.DF;
    return Object.assign(found, {
      DC: 2 * c.embed * e.count * ways,
      experts: 2 * (2 + c.gated) * c.embed * c.hidden * (c.slots / c.tokens),
      DM: (1 + c.gated) * 2 * c.embed * e.shared, FD: 2 * c.embed * e.shared});
  };
  // FLOPs that remat does again: [what the scores and values are of them, the rest is as it is].
  const redoneOf = (c, each, policy) => {
    const all = sum(Object.values(each)), {scores, values, FD, experts = 0} = each;
    if (policy === "none") return c.byRow ? scores : 0;
    if (policy === "products") return experts + (c.byRow ? scores : scores + values);
    if (policy === "attention") return all - FD - values;
    return all - FD + (c.byRow ? scores : 0);
  };
  // FLOPs that the matrix units of one device could do in the time of a step's products.
  const spent = (c, plan, rows) => {
    const [forward, redone, backward] = passesOf(plan);
    const narrow = Math.max(1, SIDE / (c.embed / c.heads));
    const layers = c.once(`spent ${plan.model} ${plan.remat}`, () => c.layered.map(
      ([count, ...kind]) => {
        const each = productsOf(c, ...kind, plan.model);
        for (const name of ["scores", "values"]) each[name] *= narrow;
        return [count, sum(Object.values(each)), redoneOf(c, each, plan.remat)];
      }));
    const all = sum(layers.map(([count, each, more]) =>
      count * (each * (forward + 2 * backward) + redone * more)));
    return rows * c.tokens / product(AXES.map(axis => plan[axis])) * (all + 6 * c.embed * c.padded);
  };

  const expertsBytes = (c, ways, rows) => {
    const slots = rows * c.slots, tokens = rows * c.tokens;
    const [F, M] = [c.hidden / ways, c.experts.shared / ways];
    return c.number * (2 * tiled(slots, c.embed) + (1 + c.gated) * tiled(slots, F)
      + (M ? 6 * tiled(tokens, M) : 0) - 6 * tiled(tokens, F));
  };
  // [[how many layers of a kind, bytes that wait in one of them]], of a device's rows.
  const layerBytes = (c, ways, rows, policy, byRow = c.byRow) =>
    c.once(`bytes ${ways} ${rows} ${policy} ${byRow}`, () => {
      const size = sizeOf({...parts(c, rows, ways), t: c.tokens}), as = {...c, byRow};
      return c.layered.map(([count, positions, routed]) => [count,
        sum(waiting(as, positions, policy, ways, false).map(
          ([many, letters, bytes]) => many * bytes * size(letters)))
        + (routed && policy === "none" ? expertsBytes(c, ways, rows) : 0)]);
    });
  const all = layers => sum(layers.map(([count, bytes]) => count * bytes));

  // {what: bytes} that one device holds.
  const memory = (c, plan, rows) => {
    const {microbatches: m, stage: p, model, batch, expert, remat, rules, schedule} = plan;
    const b = microbatch(plan, rows), n = c.number, kind = policy => layerBytes(c, model, b, policy);
    const kept = p === 1 ? 1 : turns(plan).kept, V = Math.floor(Math.floor(c.padded / model) / p);
    const own = rules === "tensor_parallel" ? used(c, plan) : ownParameters(c, plan, batch);
    let waits = all(kind(remat)) / p;
    if (schedule === "lockstep" && p > 1) waits = waits / kept + kind("all")[0][1];
    const loops = m > 1 || p > 1, table = 4 * V * c.embed, tokens = b * c.tokens;
    const scattered = isFullySharded(plan) && p === 1;
    const gradients = scattered || !loops ? stored(c, plan) : used(c, plan);
    return {
      parameters: 4 * stored(c, plan), moments: 8 * own,
      gradients: 4 * (loops ? 2 : 1) * gradients,
      gathered: n * used(c, plan), activations: Math.trunc(kept * waits),
      layer: Math.max(...kind("none").map(([, bytes]) => bytes)) + (scattered ? table : 0)
        + 2 * n * tiled(tokens, c.hidden / model) * (c.period - 1),
      logits: n * tiled(Math.min(tokens, CHUNK), V) + table,
      inputs: 4 * 2 * tiled(m * b, c.tokens) + (p > 1 ? 2 * n * tiled(m * tokens, c.embed) : 0),
    };
  };
  const peak = held => sum(Object.values(held)) - held.layer - held.logits
    + Math.max(held.layer, held.logits);

  // Bytes to and from the memory of one device.
  const moved = (c, plan, rows, held) => {
    const {microbatches: m, stage: p, model, remat} = plan, n = c.number;
    const b = microbatch(plan, rows), [forward, redone, backward] = passesOf(plan);
    const again = remat === "none" ? 0 : redone, slots = slotsOf(plan);
    const [passes, first] = slots ? [2 * slots, 0] : [2 * again + 3 * backward, 2 * forward];
    const made = policy => m / p * all(layerBytes(c, model, b, policy, 0));
    const begun = made(remat === "none" ? "none" : "products");
    const stacked = slots ? m * slots * held.activations
      : m * all(layerBytes(c, model, b, remat)) / p * forward;
    const tokens = rows / plan.batch / plan.expert * c.tokens, V = c.padded / model / p;
    return sum([made("none") * passes + begun * first, 2 * stacked,
                m * n * used(c, plan) * (forward + again + backward),
                2 * 4 * used(c, plan) * m * backward, 8 * 4 * stored(c, plan), 4 * 4 * tokens * V]);
  };
  // Random numbers that one device draws for dropout: those of its own rows and layers.
  const drawn = (c, plan, rows) => {
    const [forward, redone] = passesOf(plan), own = rows / (plan.batch * plan.expert);
    const passes = slotsOf(plan) || forward + redone * (plan.remat !== "none");
    return passes * own * c.tokens * c.embed * 2 * c.layers / plan.stage;
  };
  // On a torus without wraparound: every dimension is a line.
  const wireSeconds = (kind, sizes, bytes, {links, link}) => {
    const sent = SEND[kind](product(sizes), bytes);
    if (kind === "collective-permute") return sent / link;
    if (kind === "all-to-all")
      return bytes * Math.max(...sizes.map(size => Math.floor(size ** 2 / 4) / size)) / link;
    return sent / (Math.min(sizes.length, links) * link);
  };
  // {what: seconds} of a step; place: of meshbook.places.spans, for all five axes.
  const seconds = (c, plan, rows, device, place, held = memory(c, plan, rows)) => {
    const found = {products: spent(c, plan, rows) / device.flops,
                   memory: moved(c, plan, rows, held) / device.bandwidth,
                   random: drawn(c, plan, rows) * DRAWN / LANES / device.clock};
    for (const [kind, axes, bytes] of traffic(c, plan, rows)) {
      const at = axes.map(axis => place[AXES.indexOf(axis)]);
      const shared = Math.max(...at.map(([, each]) => each));
      found[axes[0]] = (found[axes[0]] ?? 0)
        + shared * wireSeconds(kind, at.flatMap(([sizes]) => sizes), bytes, device);
    }
    return found;
  };
  return {AXES, decoder, traffic, memory, peak, seconds};
})();
