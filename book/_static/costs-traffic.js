// What a step sends: meshbook.costs.traffic and .transfers in JavaScript.
"use strict";

meshbook.costs.parts.push((data, known) => {
  const {product, sum} = meshbook;
  const {axes: AXES} = data;
  const {floor, without} = meshbook.costs.helpers;
  const {CHUNK, LOADS} = data.constants;
  const {isFullySharded, checkSlots, turns} = known;

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

  return {isByHand, sent, added, stepTraffic};
});
