// What a device holds, moment by moment: meshbook.costs.memory and .timeline in JavaScript.
"use strict";

meshbook.costs.parts.push((data, known) => {
  const {product, sum, tiled, tokenRows} = meshbook;
  const {kinds: KINDS} = data;
  const {floor, upTo, mapped} = meshbook.costs.helpers;
  const {BLOCK, CHUNK} = data.constants;
  const {NONE, numberOf, chosen, checkSlots, turns, isByHand} = known;

  // How arrays are stored: in tiles, as on a TPU, or as they are; bytes of the narrow numbers, and
  // of those that a layer keeps for products, which take bfloat16 on a TPU.
  const sizeOf = (step, tiles) => {
    const number = step.table.stacked ? step.config.number : 2;
    const isNarrow = tiles && step.remat === "none" && step.plan.stage === 1;
    return {tiles, number, read: isNarrow ? 2 : number};
  };
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
  // Whether devices have heads of all tokens while they attend.
  const isExchanged = ({context, method}) => context > 1 && method === "ulysses";
  const listOf = ({table}, name) => name.startsWith("working ")
    ? table.working[name.slice("working ".length)] : table.kept[name] ?? table[name];
  // Bytes of Kept rows on one device, of a microbatch. name: a policy, "inputs", or "working MLP".
  const bytesOf = (step, name, flags, size, scores = false) => {
    const {plan, layout: lies} = step, B = floor(step.rows, plan.microbatches);
    const how = `${size.tiles} ${size.read} ${isExchanged(plan)}`;
    const key = `${name} ${B} ${how}: ${flags.key} ${scores}`;
    return step.once(key, () => {
      const also = new Set([...flags, ...(scores ? ["scores"] : []),
                            ...(plan.model > 1 ? ["model"] : []),
                            ...(isExchanged(plan) ? ["exchanged"] : [])]);
      const known = {...step.sizes, B};
      return sum(chosen(listOf(step, name), also).map(({letters, count, bytes, read}) => {
        const sizes = lies.ways(letters).map((ways, at) => Math.ceil(known[letters[at]] / ways));
        const width = bytes || (read ? size.read : size.number);
        return count * width * numbersIn(size, letters, sizes);
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
  // Bytes of weights for products: all, or of one turn of the loop where they are made again. Those
  // that are not gathered are copied where products have narrower numbers; a TPU gathers bfloat16.
  const gatheredOf = (step, size) => {
    const {placed: all, table, layout: {rules}} = step;
    if (!table.stacked) return size.number * gatheredBy(all);
    const again = isByHand(step) ? rules.regather : step.remat !== "none";
    const split = all.filter(({used, stored}) => used !== stored);
    const made = size.number < 4 ? all : split;
    const inside = usedBy(made.filter(({inLayers}) => inLayers));
    const byLayer = isByHand(step) ? step.plan.stage === 1 : !loops(step.plan);
    const less = split.length && again && byLayer
      ? floor(inside, Math.min(...layersOf(step))) - inside : 0;
    return (size.tiles ? 2 : size.number) * (usedBy(made) + less);
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
  // Bytes of the layer whose backward pass runs: all that it makes, if it is made again. Its MLP
  // goes back first, then its attention.
  const layerOf = (step, size) => {
    const {table, sizes, remat, kinds} = step;
    const fill = (name, own) => bytesOf(step, name, own.flags, size);
    if (!table.stacked) return remat === "none" ? 0
      : Math.max(...kinds.map(own => fill("none", own) - fill(remat, own)));
    const least = Math.min(...layersOf(step)), period = floor(sum(layersOf(step)), least);
    const working = Math.max(...kinds.map(own => fill("working layer", own) + Math.max(
      fill("working MLP", own), fill("working attention", own) + ofBlocks(step, own.flags, size))));
    const units = floor(sizes.F, step.layout.parts("F"));
    const hidden = numbersIn(size, "BF", [step.numbersOf("BW"), units]);
    // before they are scattered: of the table, and of a period
    const whole = isScattered(step) ? sum(step.placed
      .filter(({row, inLayers}) => inLayers || row.shape === "VD")
      .map(({used, inLayers}) => floor(used, inLayers ? least : 1))) : 0;
    return working + 2 * size.number * hidden * (period - 1) + 4 * whole;
  };
  // Bytes of attention in blocks where it goes back: blocks of scores, gradients in float32, and
  // the keys and values of other devices.
  const ofBlocks = (step, flags, size) => {
    if (!flags.has("blocks") || flags.has("fused")) return 0;
    const {sizes, plan: {context: ways, method}} = step;
    const heads = floor(floor(sizes.H, step.layout.parts("H")), method === "ulysses" ? ways : 1);
    const side = Math.min(BLOCK, floor(sizes.T, ways));
    const ofKeys = {ring: 2 * 8, gather: ways * (2 * size.number + 8), ulysses: 8}[method];
    return 2 * 4 * step.microbatch * heads * side * side + 4 * step.numbersOf("BTHK")
      + (ways > 1 ? ofKeys : 8) * step.numbersOf("BTGK");
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

  return {sizeOf, keptBytes, stepMemory, stepTimeline, total, stepPeak};
});
