// The decoder in the calculator: meshbook.planning.decoder_costs and decoder_memory in JavaScript.
// tests/book/test_calculator.py holds every number to the Python's. A weight is [how many, letters].
"use strict";

meshbook.MODELS.Decoder = meshbook.MODELS.JAXformer = (() => {
  const {up, product, sum, tiled, tokenRows, KINDS} = meshbook;
  const isSplit = letters => /[HGFV]/.test(letters); // what "model" divides
  const BY_HAND = ["zero1", "zero2", "fully_sharded_kept", "fully_sharded_again"];
  const flat = (c, of) => c.kinds.flatMap(([layers, positions]) => of(c, positions).map(
    ([count, letters]) => [layers * count, letters]));

  const complete = sizes => {
    const c = {...sizes, padded: up(sizes.vocabulary, 128)};
    const {embed, heads, groups, latent, rotary, layers, period} = c;
    const multiple = (name, size, of, parts) => {
      if (size % parts) throw new RangeError(`${name}=${size} is not a multiple of ${of}=${parts}`);
    };
    multiple("embed", embed, "heads", heads);
    if (groups) multiple("heads", heads, "groups", groups);
    multiple("layers", layers, "period", period);
    if (groups && latent) throw new RangeError("keys and values come from groups or from a latent");
    if (rotary && !latent) throw new RangeError(`rotary=${rotary} is for a latent`);
    if ((latent ? rotary : embed / heads) % 2)
      throw new RangeError("rotary positions turn pairs of numbers");
    const all = layers / period;
    return {...c, kinds: period === 1 ? [[all, true]] : [[all * (period - 1), true], [all, false]],
            of: {T: c.tokens, D: embed, F: c.hidden, H: heads, K: embed / heads,
                 G: groups || heads, R: latent, P: rotary, V: c.padded}};
  };
  const matrices = (c, positions) => {
    const turned = c.rotary && positions ? [[2, "RP"], [2, "RHP"]] : [];
    const heads = c.latent ? [[2, "DR"], [1, "RHK"], ...turned, [2, "RHK"]]
      : [[1, "DHK"], [2, "DGK"]];
    return [...heads, [1, "HKD"], [1 + c.gated, "DF"], [1, "FD"]];
  };
  const vectors = (c, positions) => {
    const made = {DR: "R", RP: "P", HKD: "D", FD: "D"}; // what a matrix gives, if not its rest
    const given = matrices(c, positions).map(([count, letters]) => {
      const own = made[letters] ?? letters.slice(1);
      return [own === "P" || own === "HP" ? 1 : count, own];
    });
    return [[2 * (1 + c.bias), "D"], ...(c.bias ? given : [])];
  };
  const ends = c => [[1, "VD"], [1 + c.bias, "D"]];
  const weights = c => [...flat(c, matrices), ...flat(c, vectors), ...ends(c)];
  const numbers = (c, list, ways, rows = 1) => sum(list.map(([count, letters]) =>
    count * product([...letters].map(letter => c.of[letter]))
      / (isSplit(letters) ? ways : 1) / (letters.includes("D") ? rows : 1)));
  const withD = (c, ways) => numbers(c, weights(c).filter(([, x]) => x.includes("D")), ways);

  const work = (c, batch, ways, preset) => {
    const times = preset === "sequence_parallel" ? 1 : ways;
    let [useful, done] = [0, 0];
    for (const [layers, positions] of c.kinds) {
      const of = (count, x) => 2 * count * product([...x].map(letter => c.of[letter]));
      const turned = c.latent && positions ? c.rotary : 0;
      const [scores, values] = [2 * c.tokens * (c.embed + c.heads * turned),
                                2 * c.tokens * c.embed];
      const all = repeats => scores + values + sum(matrices(c, positions).map(
        ([count, x]) => of(count, x) * (isSplit(x) ? 1 : repeats)));
      const byRow = c.byRow ? scores : 0; // which it always does again
      const again = {none: byRow, products: c.byRow ? scores : scores + values,
                     attention: all(times) - of(1, "FD") - values,
                     all: all(times) - of(1, "FD") + byRow};
      useful += 3 * layers * all(1);
      done += layers * (3 * all(times) + again[c.remat]);
    }
    useful += 6 * c.embed * c.vocabulary;
    done += 6 * c.embed * c.padded;
    if (preset === "data_parallel") done *= ways;
    return [batch * c.tokens * useful, done / useful];
  };

  // [[kind, axis, result bytes]]; gradients are clipped by their norm, a number for each leaf.
  const traffic = (c, own, rows, across, preset) => {
    const ways = preset === "data_parallel" ? 1 : across, tokens = own * c.tokens, D = c.embed;
    const kinds = c.period === 1 ? [true]
      : [...Array.from({length: c.period - 1}, () => true), false];
    const leaves = ["VD", "D", ...kinds.flatMap(positions => [
      "D", "D", ...matrices(c, positions).map(([, x]) => x)])];
    if (c.bias) leaves.push("D", ...kinds.flatMap(positions => [
      "D", "D", ...vectors(c, positions).slice(1).map(([, x]) => x)]));
    const split = leaves.filter(isSplit).length, whole = !BY_HAND.includes(preset);
    const own_matrices = flat(c, matrices).filter(([, x]) => !isSplit(x)), moved = [];
    const into = positions => c.latent ? 2 * c.latent + (positions ? c.rotary : 0) : D;
    let late = 0; // gradients of matrices that see a device's own tokens: over both axes
    if (ways > 1 && preset === "sequence_parallel") {
      const again = c.remat === "none" ? 0 : 1;
      let [gathered, scattered] = [2 * D, 2 * D];
      for (const [layers, positions] of c.kinds) {
        gathered += layers * ((1 + again) * (into(positions) + D) + 2 * D);
        scattered += layers * (2 * D + into(positions) + D + again * D);
      }
      const summed = (1 + c.bias) * D + numbers(
        c, flat(c, vectors).filter(([, x]) => !isSplit(x)), 1);
      late = 4 * numbers(c, own_matrices, 1);
      moved.push(["all-gather", "model", 4 * tokens * gathered],
                 ["reduce-scatter", "model", 4 * tokens * scattered / ways],
                 ["all-reduce", "model", 4 * (summed + 3 * tokens + split) + (rows > 1 ? 0 : late)]);
    } else if (ways > 1) {
      const again = ["attention", "all"].includes(c.remat) ? 1 : 0;
      const found = 2 * D + sum(c.kinds.map(([layers, positions]) =>
        layers * ((3 + again) * D + into(positions))));
      moved.push(["all-reduce", "model", 4 * (tokens * (found + 3) + split)]);
    }
    if (rows === 1) return moved;
    const all = numbers(c, weights(c), ways), table = numbers(c, [[1, "VD"]], ways);
    const norms = /^(fully|zero)/.test(preset) ? leaves.filter(x => x.includes("D")).length : 0;
    moved.push(["all-reduce", "batch", 4 * (2 + norms + (
      whole ? all + table : all - withD(c, ways))) - late]);
    if (late) moved.push(["all-reduce", "batch, model", late]);
    const again = c.remat === "none" ? 0 : 1; // what is gathered again in the backward pass
    const layered = list => numbers(c, list.filter(([, x]) => x.includes("D")), ways);
    const twice = layered(flat(c, matrices)) + (again
      ? layered(flat(c, vectors)) - c.bias * c.layers * D : 2 * c.layers * D); // scales of norms
    if (!whole) moved.push(
      ["reduce-scatter", "batch", 4 * withD(c, ways) / rows],
      ["all-gather", "batch", 4 * (withD(c, ways) + (
        preset === "fully_sharded_again" ? twice : 0))]);
    if (preset === "fully_sharded") moved.push(
      ["all-gather", "batch", 4 * (withD(c, ways) + table + again * twice)]);
    return moved;
  };

  // [[how many, letters, bytes of a number]]; t: tokens, where they are split
  const waiting = (c, positions, policy, ways, split) => {
    const n = c.number, x = [1, "BtD", n], whole = [1, split ? "BTD" : "BtD", n];
    const found = [1, "BTHK", n], kept = policy === "none";
    if (policy === "all") return [x];
    if (policy === "attention") return [x, found];
    const turned = c.latent && c.rotary && positions;
    const heads = c.latent ? [[2, kept ? "BTR" : "BtR", n], [3, "BTHK", n]]
      : [[1, "BTHK", n], [2, "BTGK", n]];
    if (turned) heads.push([1, "BTHP", n], [1, kept ? "BTP" : "BtP", n]);
    if (!kept) return [x, whole, ...heads, [1 + c.gated, "BTF", n]];
    return [[6, "BtD", 4], [4, "Bt", 4], c.latent ? x : whole, whole, ...heads,
            ...(turned ? [[2, "BtR", n]] : []), ...(turned && ways > 1 ? [[2, "BTR", n]] : []),
            ...(c.byRow ? [] : [[1, "BHTT", 4], [1, "BHTT", n], [2, "BHT", 4]]),
            ...Array(c.latent && c.bias && c.byRow ? 2 : 1).fill(found), // and with the bias
            [2, "BtD", 1], [6, "BTF", n]];
  };
  const sizeOf = letters => {
    const of = letter => letters[letter];
    return names => {
      const [first, ...others] = [...names].map(of);
      if (others.length === 1) return tiled(first, ...others);
      if (names[1] === "H") return first * tiled(...others);
      if (others.length === 2) return tokenRows(first, ...others);
      return first * tiled(product(others.slice(1)), others[0]);
    };
  };
  const parts = (c, own, ways) => Object.fromEntries(Object.entries({...c.of, B: own}).map(
    ([letter, size]) => [letter, isSplit(letter) ? size / ways : size]));
  const memory = (c, own, ways, rows, preset) => {
    const split = preset === "sequence_parallel" && ways > 1, n = c.number;
    const sharded = preset.startsWith("fully_sharded");
    const size = sizeOf({...parts(c, own, ways), t: c.tokens / (split ? ways : 1)});
    const bytes = policy => sum(c.kinds.map(([layers, positions]) => layers * sum(
      waiting(c, positions, policy, ways, split).map(
        ([count, letters, each]) => count * each * size(letters)))));
    const [all, one] = [1, rows].map(parts => numbers(c, weights(c), ways, parts));
    const keeps = preset === "fully_sharded_kept"
      || c.remat === "none" && preset !== "fully_sharded_again";
    let gathered = keeps
      ? numbers(c, flat(c, matrices), ways) : 0;
    if (rows > 1 && sharded) gathered += numbers(c, ends(c), ways);
    const V = c.padded / ways;
    return {
      parameters: 4 * (sharded ? one : all),
      moments: 8 * (sharded || BY_HAND.includes(preset) ? one : all),
      gradients: 4 * (sharded || preset === "zero2" ? one : all),
      gathered: n * gathered, inputs: 4 * 2 * tiled(own, c.tokens), activations: bytes(c.remat),
      layer: bytes("none") * c.period / c.layers,
      logits: n * tiled(Math.min(512, own * c.tokens), V) + 4 * numbers(c, [[1, "VD"]], ways),
    };
  };
  const moments = (c, held) => {
    const {parameters, moments, inputs, gathered, gradients, activations, layer, logits} = held;
    const moment = (phase, block, more) => {
      const all = {parameters, moments, inputs, ...more};
      return {phase, block, held: Object.fromEntries(KINDS.map(kind => [kind, all[kind] ?? 0]))};
    };
    const each = Array.from({length: c.layers}, (_, at) => at + 1);
    return [moment("forward", 0), ...each.map(at => moment("forward", at, {gathered, activations})),
            moment("loss", null, {gathered, activations, logits}),
            ...each.reverse().map(at => moment("backward", at, {
              gathered, gradients, activations: activations + layer})),
            moment("backward", 0, {gradients}), moment("update", null, {gradients})];
  };

  const estimate = (c, {preset, rows, across, batch, device}) => {
    const ways = preset === "data_parallel" ? 1 : across, own = batch / rows;
    const sharded = preset.startsWith("fully_sharded");
    const held = memory(c, own, ways, rows, preset), timeline = moments(c, held);
    const [useful, factor] = work(c, batch, across, preset);
    const moved = traffic(c, own, rows, across, preset), flops = useful * factor / (rows * across);
    const half = 2 * withD(c, ways); // a compiler can gather in bfloat16, and reduce in pieces
    const least = sharded && rows > 1 ? [
      ...moved.filter(([, axis]) => axis !== "batch"),
      ["all-gather", "batch", half], ["reduce-scatter", "batch", 2 * half / rows]] : moved;
    return {memory: Object.fromEntries(KINDS.map(
      kind => [kind, Math.max(...timeline.map(({held}) => held[kind]))])),
      timeline, useful, factor, flops, moved, least,
      through: 2 * (held.activations + (held.gathered || held.parameters)) + 8 * held.parameters};
  };
  return {complete, estimate, memory, numbers, weights, ends, flat, matrices, vectors, waiting, sizeOf,
          parts, BY_HAND};
})();
