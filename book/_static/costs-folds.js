// What a step adds up to: work, traffic, memory, timeline and seconds of meshbook.costs.
"use strict";

meshbook.costs.parts.push((data, known) => {
  const {product, sum, tiled, tokenRows} = meshbook, {axes: AXES, kinds: KINDS} = data;
  const {floor, upTo, without, refuse, mapped} = meshbook.costs.helpers;
  const {NONE, numberOf, chosen, isFullySharded, checkSlots} = known;
  const {alongAll, linkSeconds} = known;
  const {BLOCK, CHUNK, DRAWN, LANES, LOADS, OF_BOUNDS, OF_ESTIMATE, SIDE} = data.constants;

  // turns.py

  // The turns of a pipeline's schedule in one program.
  const turnsOf = (schedule, p, m) => {
    if (!data.schedules.includes(schedule)) refuse(
      `expected a schedule, one of ${data.schedules.join(", ")}; found '${schedule}'`);
    if (schedule === "gpipe") {
      const turns = m + p - 1;
      return {permutes: 2 * turns, bubble: (p - 1) / turns, kept: turns, waiting: 0,
              factor: turns / m};
    }
    if (schedule === "lockstep") return {
      permutes: 2 * (m + 2 * (p - 1)), bubble: (p - 1) / (m + p - 1), kept: 2 * p - 1, waiting: 0,
      factor: 4 / 3};
    const one = schedule === "one_f_one_b", kept = Math.min(m, p);
    const slots = one ? 3 * m + 2 * (p - 1) : Math.max(3 * m + p - 1, 2 * (m + p) - 1);
    return {permutes: 2 * slots, bubble: 1 - 3 * m / slots, kept, waiting: one ? 1 : kept,
            factor: 1};
  };
  const turns = plan => turnsOf(plan.schedule, plan.stage, plan.microbatches);
  // How often a layer goes [forward, through what remat does again, backward] for a microbatch.
  const passesOf = plan => {
    const {stage: p, microbatches: m, schedule} = plan;
    if (p === 1) return [1, 1, 1];
    const each = schedule === "lockstep" ? (m + p - 1) / m : turns(plan).permutes / 2 / m;
    if (schedule === "lockstep") return [2 * each, each, each];
    return Array(3).fill(schedule === "gpipe" ? each : each / 3);
  };
  // Slots of a schedule's table for a microbatch, 0 for schedules that have none.
  const slotsOf = plan => plan.stage === 1 || ["gpipe", "lockstep"].includes(plan.schedule) ? 0
    : turns(plan).permutes / 2 / plan.microbatches;

  // work.py

  // FLOPs of one device: its share of what must be done, what it executes, what its matrix units
  // could do in that time.
  const stepWork = step => {
    checkSlots(step);
    const found = {useful: 0, done: 0, spent: 0};
    const passes = passesOfRows(step);
    step.placed.forEach(({row, flags, flops, useful}, at) => {
      const isNarrow = row.letters.includes("U"); // between the queries and keys of one head
      const executed = flops * passes[at] * (isNarrow && flags.has("skipped") ? unmasked(step) : 1);
      found.useful += useful * (1 + row.gradients);
      found.done += executed;
      found.spent += executed * (isNarrow ? Math.max(1, SIDE / step.sizes.K) : 1);
    });
    return found;
  };
  // How often a device computes the product of each row that is placed, per pass of all rows.
  const passesOfRows = step => {
    const [forward, redone, backward] = passesOf(step.plan);
    return step.placed.map(({row, inLayers}) => inLayers ? forward + redone
      * row.again.filter(policy => policy === step.remat).length + row.gradients * backward
      : 1 + row.gradients);
  };
  // The share of pairs of tokens that attention needs: of text, what a causal mask leaves.
  const unmasked = ({sizes: {T, V}}) => V ? (T + 1) / (2 * T) : 1;
  const leastWork = step => {
    const passes = passesOfRows(step);
    return sum(step.placed.map(({row, flops}, at) =>
      flops * passes[at] * (row.letters.includes("U") ? unmasked(step) : 1)));
  };

  // traffic.py

  const WEIGHTS = "weights", GRADIENTS = "gradients of weights", KEYS = "keys and values";
  const toSend = (part, when, what, kind, axes, count, bytes) =>
    ({part, when, what, kind, axes, count, bytes});
  const [ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, PERMUTE] = [
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"];
  const meets = (axes, others) => axes.some(axis => others.includes(axis));
  const isByHand = step => step.layout.rules.gradients !== null;

  // How often a device's layers exchange what a microbatch needs, in a step.
  const inLayersOf = ({plan}) => plan.stage > 1 && plan.schedule === "gpipe"
    ? turns(plan).permutes / 2 : plan.microbatches;
  // Whether the number of collectives along "model" is known: the compiler merges none of them.
  const isCounted = (step, clipped) => step.kinds.length === 1
    && !(isByHand(step) && clipped || step.sizes.R && step.layout.along.length || step.sizes.E);
  // Sums of what products make, and of gradients of what they read.
  const ofProducts = (step, number, clipped) => {
    const found = [], read = new Map(), counted = isCounted(step, clipped);
    const often = inLayersOf(step);
    for (const each of step.placed) {
      const {row, axes: {summed, made, inside}} = each;
      const times = each.layers * (each.inLayers ? often : step.plan.microbatches);
      if (summed.length) found.push(...ofMade(step, each, times, number, counted));
      if (row.reads && made.length) {
        const key = `${each.flags.key}: ${row.together}`, together = read.get(key) ?? new Set();
        if (!together.has(row.reads)) {
          const count = together.size ? 0 : times; // names before a "/" travel as one
          found.push(...ofRead(step, each, times, number, counted ? count : null));
        }
        read.set(key, together.add(row.reads));
      }
      if (inside.length) found.push(
        toSend(each.part, "backward", GRADIENTS, ALL_REDUCE, inside, null,
               times / each.layers * 4 * each.used));
    }
    return found;
  };
  // What a product makes is a part of a sum on each device: added up, or scattered by tokens.
  const ofMade = (step, {row, part, inLayers, axes: {summed: axes}}, times, number, counted) => {
    const again = times * (inLayers && isMadeAgain(step, row)), what = `output of ${row.title}`;
    const [parts, whole] = ["BT", "BW"].map(tokens => number * step.numbersOf(tokens + row.made));
    const scatters = meets(axes, step.layout.along);
    const [kind, bytes] = scatters ? [REDUCE_SCATTER, parts] : [ALL_REDUCE, whole];
    return [
      ["forward", what, kind, times, bytes], ["backward", `${what}, again`, kind, again, bytes],
      ["backward", `gradient of the ${what}`, ALL_GATHER, times * scatters, whole],
    ].map(([when, words, own, often, size]) =>
      toSend(part, when, words, own, axes, counted ? often : null, often * size));
  };
  // Whether a sum is made again: products that are kept are sums already, but not by hand.
  const isMadeAgain = (step, row) => {
    const byHand = step.plan.stage > 1 || step.layout.along.length;
    const policy = step.remat === "products" && byHand ? "attention" : step.remat;
    return row.again.includes(policy) && row.tokens === "BT"; // experts' are added up by token
  };
  // The gradient of what products read is a part of a sum; tokens are gathered for them.
  const ofRead = (step, {row, part, inLayers, axes: {made: axes}}, times, number, count) => {
    const width = row.exact ? 4 : number, what = `input of the ${row.together}`;
    const [parts, whole] = ["BT", "BW"].map(tokens => width * step.numbersOf(tokens + row.summed));
    const again = inLayers && step.remat !== "none";
    const gradient = (kind, bytes) =>
      toSend(part, "backward", `gradient of the ${what}`, kind, axes, count, times * bytes);
    return meets(axes, step.layout.along) ? [
      toSend(part, "forward", what, ALL_GATHER, axes, count, times * whole),
      toSend(part, "backward", `${what}, again`, ALL_GATHER, axes, count && count * again,
             times * again * whole),
      gradient(REDUCE_SCATTER, parts)] : [gradient(ALL_REDUCE, whole)];
  };
  // Whether the ViT and MiniGPT sum a gradient in each part of a batch, before all parts are.
  const isSummedAtOnce = ({plan, table}, {summed, shape, travels}) => plan.microbatches > 1
    && !(table.stacked || summed || !travels || shape.includes("V"));
  // A parameter that is gathered, and the sum of its gradient, for each of its uses.
  const ofParameter = (step, each, number) => {
    const {plan} = step, {row, axes: {tokens, owned, own}} = each;
    const byHand = isByHand(step) || plan.stage > 1;
    if (byHand && own) return row.is_parameter ? scattered(step, each, number) : [];
    const once = byHand || plan.microbatches > 1;
    if (row.of && once) return [];
    const {stacked} = step.table, width = row.exact || once ? 4 : number;
    const bytes = width * (each.used || ofAnother(step, row)), count = stacked ? null : 0;
    const often = 1 + plan.microbatches * isSummedAtOnce(step, row);
    const travels = row.travels || plan.stage > 1 || !stacked && once;
    const found = !travels ? [] : summedOver(step, row, tokens).map(
      axes => toSend(each.part, "backward", GRADIENTS, ALL_REDUCE, axes, count, often * bytes));
    if (owned.length) {
      const again = each.inLayers && stacked && step.remat !== "none"
        && row.backward !== "never" && !once, leaves = once && stacked ? 1 : each.layers;
      for (const [when, what, times] of [
        ["forward", WEIGHTS, 1], ["backward", `${WEIGHTS}, again`, Number(again)]])
        found.push(toSend(each.part, when, what, ALL_GATHER, owned, times * leaves,
                          times * bytes));
    }
    return found;
  };
  // Numbers of another row's parameter on one device.
  const ofAnother = (step, {of}) => floor(
    product([...of].map(letter => step.sizes[letter])), step.layout.parts(of));
  // The axes of a gradient's sums: those of a vector over rows and over tokens are apart.
  const summedOver = (step, row, tokens) => {
    const {along} = step.layout;
    return !row.summed && meets(tokens, along) ? [without(tokens, along), along] : [tokens];
  };
  // Gathered where it is used, its gradient scattered where its moments lie.
  const scattered = (step, {row, part, inLayers, used, axes: {owned, tokens}}, number) => {
    const {plan, layout: {rules, devices}} = step, full = isFullySharded(plan);
    const parts = full && plan.stage === 1 ? plan.microbatches : 1;
    const gathers = inLayers ? parts : 1; // what stands outside of the layers stays gathered
    const width = full ? number : 4; // what was updated, or what products need
    const again = rules.regather && full && inLayers && (
      row.backward === "always" || row.backward === "again" && step.remat !== "none");
    const bytes = floor(parts * 4 * used, devices(owned));
    const first = full ? ["forward", WEIGHTS] : ["update", `updated ${WEIGHTS}`];
    const back = (what, kind, axes, size) => toSend(part, "backward", what, kind, axes, null, size);
    return [
      toSend(part, ...first, ALL_GATHER, owned, null, gathers * width * used),
      back(`${WEIGHTS}, again`, ALL_GATHER, owned, parts * again * width * used),
      back(GRADIENTS, REDUCE_SCATTER, owned, bytes),
      back(GRADIENTS, ALL_REDUCE, without(tokens, owned), bytes)];
  };
  // Slots that travel to experts and back, and what a layer sums of their loads.
  const ofExperts = (step, number, balanced) => {
    const {plan, sizes, layout: {over}, config: {experts}} = step;
    if (!experts) return [];
    const {part, layers} = step.kinds.find(({flags}) => flags.has("experts"));
    const again = (step.remat !== "none") + (plan.stage > 1 && plan.schedule === "lockstep");
    const times = inLayersOf(step) * layers;
    const slots = number * step.microbatch * sizes.E * sizes.Z * sizes.D;
    const loads = plan.stage === 1 ? LOADS + again : Boolean(experts.auxiliary || experts.biased);
    const what = "tokens to their experts and back";
    return [
      ...[["forward", what, 2 * times], ["backward", `${what}, again`, 2 * again * times],
          ["backward", "gradients of these tokens", 2 * times]].map(([when, words, count]) =>
        toSend(part, when, words, ALL_TO_ALL, over("BZED", "E"), count, count * slots)),
      toSend(part, "forward", "loads of experts", ALL_REDUCE, over("BT", "BT"), null,
             balanced * times * 4 * loads * experts.count)];
  };
  // Keys and values of other devices: in a ring, gathered, or heads for tokens (Ulysses).
  const ofContext = (step, number) => {
    const {plan: {context: ways, method}, remat} = step;
    if (ways === 1) return [];
    const [keys, queries] = ["BTGK", "BTHK"].map(step.numbersOf);
    const passes = 1 + ["products", "all"].includes(remat); // forward, with the one done again
    const kept = remat === "attention"; // what was found is kept, queries and keys are not
    const size = number * keys, around = 2 * (ways - 1), both = number * (queries + keys);
    const [again, back, heads] = [`${KEYS}, again`, `gradients of ${KEYS}`, "heads for tokens"];
    const lines = {
      ring: [["forward", KEYS, PERMUTE, around, around * size],
             ["backward", again, PERMUTE, around * passes, around * passes * size],
             ["backward", back, PERMUTE, around, around * 4 * keys]],
      gather: [["forward", KEYS, ALL_GATHER, 2, 2 * ways * size],
               ["backward", again, ALL_GATHER, 2, 2 * ways * size], // serves both passes
               ["backward", back, REDUCE_SCATTER, 2, 2 * 4 * keys]],
      ulysses: [["forward", heads, ALL_TO_ALL, 4, 2 * both],
                ["backward", `${heads}, and gradients`, ALL_TO_ALL, 4 * passes + 3 * kept,
                 2 * passes * both + kept * (both + size)]]};
    return step.kinds.flatMap(({part, layers}) => {
      const times = inLayersOf(step) * layers;
      return lines[method].map(([when, what, kind, count, bytes]) =>
        toSend(part, when, what, kind, ["context"], times * count, times * bytes));
    });
  };
  // Permutes between stages, and what the first and the last stage give to all.
  const ofStages = (step, number) => {
    const {plan, placed: all} = step, {microbatches: m} = plan, axes = ["stage"];
    if (plan.stage === 1) return [];
    const one = number * step.numbersOf("BTD"), each = turns(plan).permutes / 2;
    const norm = sum(all.filter(({shape}) => shape === "D").map(({used}) => used));
    return [
      ...[["forward", "activations to the next stage"],
          ["backward", "their gradients to the stage before"]].map(([when, what]) =>
        toSend("stages", when, what, PERMUTE, axes, each, each * one)),
      ...[["head", "forward", "output of the last stage", m * one],
          ["head", "backward", GRADIENTS, 4 * norm],
          ["embedding", "backward", "gradient of the input of the first stage", m * one],
      ].map(([part, when, what, bytes]) =>
        toSend(part, when, what, ALL_REDUCE, axes, null, bytes))];
  };
  // Loss and accuracy, what the loss sums over the vocabulary, norms of split gradients.
  const ofScalars = (step, clipped) => {
    const {plan, sizes, table, layout: {over}} = step, m = plan.microbatches, norms = new Map();
    const rows = [...over("BW", "BW"), ...(plan.stage > 1 ? ["stage"] : [])];
    // the compiler takes them out of the loop over microbatches, with experts all but the first,
    // and not those of images
    const often = step.config.experts && plan.stage === 1 ? Math.min(m, 2) : 1;
    const times = "V" in sizes ? often : m, parts = m > 1 ? m : 0;
    const found = [toSend("head", "forward", "loss and accuracy", ALL_REDUCE, rows,
                          table.stacked ? null : 1 + parts, times * 2 * 4)];
    if ("V" in sizes) {
      const tokens = step.numbersOf("BW");
      found.push(toSend("head", "forward", "maximum and sums of the softmax", ALL_REDUCE,
                        over("VD", "V"), m * 2 * Math.ceil(tokens / CHUNK), m * 3 * 4 * tokens));
    }
    for (const {row, shape, leaves} of clipped ? step.placed : [])
      if (row.is_parameter && row.travels)
        for (const axis of over(shape, shape, "moments"))
          norms.set(axis, (norms.get(axis) ?? 0) + leaves);
    return [...found, ...[...norms].map(([axis, leaves]) => toSend(
      "optimizer", "update", "squared norms of gradients", ALL_REDUCE, [axis],
      axis === "model" ? 1 : null, 4 * leaves))];
  };
  // All that a step sends: [{part, when, what, kind, axes, count, bytes of results}], count null
  // where the compiler merges collectives as it likes, 0 of what travels with something else.
  const sent = (step, number = 4, clipped = false, balanced = true) => {
    checkSlots(step);
    return [
      ...ofProducts(step, number, clipped),
      ...step.placed.filter(({row}) => row.is_parameter || row.of)
        .flatMap(each => ofParameter(step, each, number)),
      ...ofExperts(step, number, balanced), ...ofContext(step, number), ...ofStages(step, number),
      ...ofScalars(step, clipped)];
  };
  // What goes over links, added up by what `named` keeps of each: [{...that, count, bytes}].
  const added = (events, named) => {
    const all = new Map();
    for (const {count, bytes, ...each} of events) {
      if (!each.axes.length || !bytes) continue;
      const axes = each.axes.length > 1 ? AXES.filter(axis => each.axes.includes(axis)) : each.axes;
      const own = named({...each, axes}), key = Object.values(own).join();
      const before = all.get(key) ?? {...own, count: 0, bytes: 0};
      const both = before.count === null || count === null ? null : before.count + count;
      all.set(key, {...before, count: both, bytes: before.bytes + bytes});
    }
    return [...all.values()].map(each => ({
      ...each, count: each.count === null ? null : Math.round(each.count),
      bytes: Math.round(each.bytes)}));
  };
  // [{kind, axes, count, bytes}] of a step
  const stepTraffic = (step, ...options) =>
    added(sent(step, ...options), ({kind, axes}) => ({kind, axes}));

  // memory.py

  // How arrays are stored: in tiles, as on a TPU, or as they are; bytes of the narrow numbers.
  const sizeOf = (step, tiles) => ({tiles, number: step.table.stacked ? step.config.number : 2});
  // Numbers that an array takes: in tiles (B, T, width) has tokens or rows above width, and an
  // array of heads has its tokens last.
  const numbersIn = ({tiles}, letters, sizes) => {
    const [first, ...others] = sizes;
    if (!tiles || !others.length) return product(sizes);
    if (others.length === 1) return tiled(first, ...others);
    if (letters[1] === "H") return first * tiled(...others); // what each head and token has
    if (letters[1] === "E") return tiled(product(sizes.slice(0, -1)), sizes.at(-1)); // slots
    if (others.length === 2) return tokenRows(first, ...others);
    const [tokens, ...width] = others;
    return first * tiled(product(width), tokens);
  };
  const listOf = ({table}, name) => name in table.kept ? table.kept[name] : table[name];
  // Bytes of Kept rows on one device, of a microbatch. name: a policy, "inputs" or "working".
  const bytesOf = (step, name, flags, size, scores = false) => {
    const {plan, layout: lies} = step, B = floor(step.rows, plan.microbatches);
    return step.once(`${name} ${B} ${size.tiles}: ${flags.key} ${scores}`, () => {
      const also = new Set([...flags, ...(scores ? ["scores"] : []),
                            ...(plan.model > 1 ? ["model"] : [])]);
      const known = {...step.sizes, B};
      return sum(chosen(listOf(step, name), also).map(({letters, count, bytes}) => {
        const sizes = lies.ways(letters).map((ways, at) => Math.ceil(known[letters[at]] / ways));
        return count * (bytes || size.number) * numbersIn(size, letters, sizes);
      }));
    });
  };
  const layersOf = ({kinds}) => kinds.map(({layers}) => layers);
  // Bytes that a device's layers keep of a microbatch by a policy of rematerialisation.
  const keptBytes = (step, policy, tiles = true, scores = false) => sum(
    step.kinds.map(({flags, layers}) => layers * bytesOf(
      step, policy, flags, sizeOf(step, tiles), scores && !flags.has("fused"))));
  const loops = plan => plan.microbatches > 1 || plan.stage > 1;
  // Whether gradients of layers are split over the rows as soon as a layer has made them.
  const isScattered = step => step.numbers.gradients < step.numbers.used && step.plan.stage === 1
    && (isByHand(step) || !loops(step.plan)) && step.table.stacked;
  // Numbers of gradients; in a loop there are those of one turn beside their sums.
  const gradientsOf = step => loops(step.plan)
    ? 2 * step.numbers[isScattered(step) ? "gradients" : "used"] : step.numbers.gradients;
  const usedBy = all => sum(all.map(({used}) => used));
  const gatheredBy = all => usedBy(all.filter(({used, stored}) => used !== stored));
  // Bytes of weights for products: all, or of one turn of the loop where they are made again.
  const gatheredOf = (step, size) => {
    const {placed: all, table, layout: {rules}} = step;
    if (!table.stacked) return size.number * gatheredBy(all);
    const again = isByHand(step) ? rules.regather : step.remat !== "none";
    const inside = usedBy(all.filter(({inLayers}) => inLayers));
    const isSplit = all.some(({used, stored}) => used !== stored);
    const less = isSplit && again && !loops(step.plan)
      ? floor(inside, Math.min(...layersOf(step))) - inside : 0;
    return size.number * (step.numbers.used + less);
  };
  // Bytes that wait for the backward pass, of all microbatches that a schedule has begun.
  const activationsOf = (step, size) => {
    const {plan} = step, waits = keptBytes(step, step.remat, size.tiles);
    if (plan.stage === 1) return waits;
    const {kept: begun, waiting} = turns(plan);
    if (plan.schedule === "lockstep") // of the others only what came into the stage
      return waits + begun * bytesOf(step, "all", step.kinds[0].flags, size);
    const more = waiting && step.remat !== "none"; // what B keeps for W, and what is at work
    return begun * waits + (more ? (waiting + 1) * forWeights(step, size) : 0);
  };
  // Bytes from which the gradients of weights are made: what products read, gradients of what they
  // make.
  const forWeights = (step, size) => {
    const read = new Set();
    return size.number * sum(step.placed
      .filter(({row, inLayers}) => inLayers && row.is_product && row.is_parameter)
      .map(({row, flags, layers}) => {
        const name = `${flags.key}: ${row.reads || row.letters}`, once = !read.has(name);
        read.add(name);
        return layers * (once ? step.numbersOf("BT" + row.summed) : 0)
          + layers * numberOf(row, flags) * step.numbersOf("BT" + row.made);
      }));
  };
  // Bytes of the layer whose backward pass runs: all that it makes, if it is made again.
  const layerOf = (step, size) => {
    const {table, sizes, remat, kinds} = step, [{flags}] = kinds;
    const fill = (name, own) => bytesOf(step, name, own.flags, size);
    if (!table.stacked) return remat === "none" ? 0
      : Math.max(...kinds.map(own => fill("none", own) - fill(remat, own)));
    const least = Math.min(...layersOf(step)), period = floor(sum(layersOf(step)), least);
    const working = Math.max(...kinds.map(own => fill(remat === "none" ? "none" : "working", own)));
    const units = floor(sizes.F, step.layout.parts("F"));
    const hidden = numbersIn(size, "BF", [step.numbersOf("BW"), units]);
    // before they are scattered: of the table, and of a period
    const whole = isScattered(step) ? sum(step.placed
      .filter(({row, inLayers}) => inLayers || row.shape === "VD")
      .map(({used, inLayers}) => floor(used, inLayers ? least : 1))) : 0;
    return working + 2 * size.number * hidden * (period - 1) + 4 * whole
      + (flags.has("blocks") && !flags.has("fused") ? ofBlocks(step, size) : 0);
  };
  // Bytes of blocks of scores, and of the keys and values of other devices.
  const ofBlocks = (step, size) => {
    const {sizes, plan: {context: ways, method}} = step;
    const heads = floor(floor(sizes.H, step.layout.parts("H")), method === "ulysses" ? ways : 1);
    const side = Math.min(BLOCK, floor(sizes.T, ways));
    const beside = {ring: 0, gather: 2 * ways * size.number, ulysses: 10 * 4}[method];
    return 4 * 4 * step.microbatch * heads * side * side
      + (ways > 1 ? beside * step.numbersOf("BTGK") : 0);
  };
  // Bytes of the logits, of a chunk or of all, with the gradient of the head.
  const logitsOf = (step, size, chunk) => {
    const {sizes, table} = step, {row} = step.placed.find(each => each.row.reads === "head");
    const count = step.numbersOf(row.made), all = step.numbersOf(row.tokens);
    const [tokens, head] = sizes.V
      ? [Math.min(all, chunk), numbersIn(size, "DV", [sizes.D, count])]
      : [all, usedBy(step.placed.slice(-table.last.length))];
    return (table.logits || size.number) * numbersIn(size, "BV", [tokens, count]) + 4 * head;
  };
  // {what: bytes} of one device, each where it is most.
  const stepMemory = (step, tiles = true, chunk = CHUNK) => {
    checkSlots(step);
    const {plan, numbers} = step, size = sizeOf(step, tiles);
    const both = plan.stage > 1 && plan.schedule === "gpipe"
      ? numbersIn(size, "BD", [plan.microbatches * step.numbersOf("BW"), step.sizes.D]) : 0;
    return {
      parameters: 4 * numbers.stored, moments: 8 * numbers.moments,
      inputs: plan.microbatches * bytesOf(step, "inputs", NONE, size) + 2 * size.number * both,
      gathered: gatheredOf(step, size), gradients: 4 * gradientsOf(step),
      activations: activationsOf(step, size), layer: layerOf(step, size),
      logits: logitsOf(step, size, chunk)};
  };

  // timeline.py

  const momentsOf = ({parameters, moments, inputs}, always = {}) => (phase, block, more = {}) => {
    const own = {parameters, moments, inputs, ...always, ...more};
    return {phase, block, held: Object.fromEntries(KINDS.map(kind => [kind, own[kind] ?? 0]))};
  };
  const ofLoop = (step, {gathered, activations, gradients, layer, logits, ...always}, blocks) => {
    const moment = momentsOf(always, loops(step.plan) ? {gradients} : {});
    const stacks = {gathered, activations};
    const working = {gathered, gradients, activations: activations + layer};
    return [moment("forward", 0), ...blocks.map(at => moment("forward", at, stacks)),
            moment("loss", null, {logits, ...stacks}),
            ...[...blocks].reverse().map(at => moment("backward", at, working)),
            moment("backward", 0, {gradients}), moment("update", null, {gradients})];
  };
  const blockByBlock = (step, found) => {
    const {placed: all, table, config: {layers: L}} = step, {number} = sizeOf(step, true);
    const {gathered, gradients, logits, layer} = found;
    const sums = loops(step.plan) ? floor(gradients, 2) : 0; // of all microbatches
    const moment = momentsOf(found, {gradients: sums});
    const [first, last] = [all.slice(0, table.first.length), all.slice(-table.last.length)];
    const block = all.filter(({inLayers}) => inLayers);
    const own = mapped({last, block}, some => 4 * sum(some.map(each => each.gradients)));
    const whole = mapped({first, block}, some => number * gatheredBy(some));
    const each = floor(found.activations, L);
    return [
      ...upTo(L).map(at => moment("forward", at, {
        activations: at * each, gathered: whole.first + floor(at * whole.block, L)})),
      moment("loss", null, {gathered, activations: L * each, logits}),
      ...upTo(L, 1).reverse().map(at => moment("backward", at, {
        gathered, activations: at * each + layer,
        gradients: sums + own.last + floor((L - at) * own.block, L)})),
      moment("backward", 0, {gathered, gradients}),
      moment("update", null, {gradients: sums || gradients})];
  };
  // The moments of a step, in order: [{phase, block, held: {kind: bytes}}].
  const stepTimeline = (step, tiles = true, chunk = CHUNK, blocks = upTo(sum(layersOf(step)), 1)) =>
    (step.table.stacked ? ofLoop : blockByBlock)(step, stepMemory(step, tiles, chunk), blocks);
  const total = ({held: own}) => sum(Object.values(own));
  // Of a loop every block holds the same.
  const stepPeak = (step, tiles = true, chunk = CHUNK) =>
    Math.max(...stepTimeline(step, tiles, chunk, [1]).map(total));

  // seconds.py

  // {what: bytes} to and from the memory of one device in a step with Adam.
  const bytesMoved = (step, tiles = true) => {
    const {plan, numbers, remat} = step, {number} = sizeOf(step, tiles), m = plan.microbatches;
    const [forward, redone, backward] = passesOf(plan), again = redone * (remat !== "none");
    const slots = slotsOf(plan);
    const [passes, first] = slots ? [2 * slots, 0] : [2 * again + 3 * backward, 2 * forward];
    const made = policy => m * keptBytes(step, policy, tiles, true);
    const stacked = slots ? m * slots * stepMemory(step, tiles).activations
      : m * keptBytes(step, remat, tiles) * forward;
    const begun = remat !== "none" && "products" in step.table.kept ? "products" : "none";
    return {
      activations: made("none") * passes + made(begun) * first, copies: 2 * stacked,
      weights: m * number * numbers.used * (forward + again + backward),
      gradients: 2 * 4 * numbers.used * m * backward, update: 8 * 4 * numbers.stored,
      logits: 4 * 4 * m * ("V" in step.sizes ? step.numbersOf("BTV") : 0)};
  };
  // Bytes to and from the memory of one device in a step with Adam, at the least.
  const bytesAtLeast = (step, tiles = true) => {
    const held = stepMemory(step, tiles);
    const kept = step.plan.microbatches * keptBytes(step, step.remat, tiles);
    return 2 * (kept + (held.gathered || held.parameters)) + 8 * held.parameters;
  };
  // Random numbers that one device draws for dropout: those of its own rows and layers.
  const numbersDrawn = ({plan, remat, config, rows, layout: {parts}, sizes}) => {
    const [forward, redone] = passesOf(plan);
    const passes = slotsOf(plan) || forward + redone * (remat !== "none");
    const own = config.dropout ? rows / parts("B") : 0;
    return passes * own * sizes.T * sizes.D * 2 * (config.layers / plan.stage);
  };
  // {mesh axis: seconds in which its collectives use the links}; the first of several has all.
  const axisSeconds = (step, device, groups) => {
    const found = {};
    for (const {kind, axes, bytes} of stepTraffic(step, step.config.number)) {
      const time = linkSeconds(kind, alongAll(axes.map(axis => groups[axis])), bytes, device);
      found[axes[0]] = (found[axes[0]] ?? 0) + time;
    }
    return found;
  };
  // {what: seconds} of a step; groups: see groupsOf.
  const stepSeconds = (step, device, groups) => {
    const cycles = numbersDrawn(step) * DRAWN / LANES, work = stepWork(step);
    if (cycles && !device.clock)
      refuse(`how long random numbers of dropout take on ${device.name} is not known`);
    return {
      products: (device.switch ? work.done : work.spent) / device.flops,
      memory: sum(Object.values(bytesMoved(step, !device.switch))) / device.bandwidth,
      random: cycles && cycles / device.clock, ...axisSeconds(step, device, groups)};
  };
  // {what: seconds} that no program for this plan beats.
  const bounds = (step, device, groups) => ({
    compute: leastWork(step) / device.flops,
    memory: bytesAtLeast(step, !device.switch) / device.bandwidth,
    links: Math.max(0, ...Object.values(axisSeconds(step, device, groups)))});
  // [least, most] seconds of a step, as far as published times say.
  const likelySeconds = (step, device, groups) => {
    const least = Object.values(bounds(step, device, groups)), most = Math.max(...least);
    const whole = sum(device.switch ? least : Object.values(stepSeconds(step, device, groups)));
    return (device.switch ? OF_BOUNDS : OF_ESTIMATE).map(times => Math.max(times * whole, most));
  };

  return {turnsOf, passesOf, slotsOf, stepWork, leastWork, sent, added, stepTraffic, keptBytes,
          stepMemory, stepTimeline, total, stepPeak, bytesMoved, bytesAtLeast, numbersDrawn,
          axisSeconds, stepSeconds, bounds, likelySeconds};
});
