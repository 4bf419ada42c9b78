// What a step of training costs: meshbook.costs in JavaScript, from the same tables. Here: tables,
// plans, where arrays lie. costs-work.js, -traffic, -memory and -seconds add up, costs-machines.js
// knows how devices are joined, and costs-ranking.js goes through all plans.
// tests/book/test_costs_js.py and test_costs_refused_js.py hold every number to the Python's.
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
  return {up, product, sum, tiled, tokenRows};
})();

// data: of meshbook.costs.page. Each part is given it, and what the parts before it have.
meshbook.costs = data => meshbook.costs.parts.reduce(
  (known, part) => ({...known, ...part(data, known)}), {});

meshbook.costs.helpers = (() => {
  const floor = (number, parts) => Math.floor(number / parts);
  const upTo = (number, first = 0) => Array.from({length: number - first + 1}, (_, i) => first + i);
  const without = (list, others) => list.filter(each => !others.includes(each));
  const words = text => text.split(" ").filter(word => word);
  const refuse = sentence => { throw new RangeError(sentence); };
  const oneOf = (name, known, found) =>
    known.includes(found) || refuse(`${name} is one of ${known.join(", ")}; found '${found}'`);
  // Keeps what it finds by a key.
  const cached = () => {
    const found = new Map();
    return (key, make) => {
      if (!found.has(key)) found.set(key, make());
      return found.get(key);
    };
  };
  const mapped = (object, change) => Object.fromEntries(
    Object.entries(object).map(([key, value]) => [key, change(value)]));
  return {floor, upTo, without, words, refuse, oneOf, cached, mapped};
})();

meshbook.costs.parts = [data => {
  const {product, sum, up} = meshbook, {axes: AXES} = data;
  const {floor, without, words, refuse, oneOf, cached, mapped} = meshbook.costs.helpers;

  // rows.py and tables.py

  // letters: "what it sums over > what it makes"; the rest of a Row follows from them. output: the
  // letters of what one of its products makes of tokens, "" of what makes nothing.
  const rowOf = row => {
    const [before, after = ""] = row.letters.split(">"), {name, tokens} = row;
    const summed = without([...before], after).join("");
    const made = without([...after], before).join("");
    const shape = row.of || [...new Set(before + after)].join("");
    const title = name.slice(0, Math.max(0, name.lastIndexOf("_")));
    const output = summed && tokens + after;
    return {...row, title, summed, made, shape, output, again: words(row.again),
            when: words(row.when), together: row.reads.split("/")[0]};
  };
  const keptOf = list => list.map(each => ({...each, when: words(each.when)}));
  const TABLES = mapped(data.tables, ({first, layer, last, inputs, kept, working, ...table}) => ({
    ...table, first: first.map(rowOf), layer: layer.map(rowOf), last: last.map(rowOf),
    kept: mapped(kept, keptOf), inputs: keptOf(inputs), working: mapped(working, keptOf)}));
  const numberOf = (row, flags) => row.count + flags.has(row.and_one_if);

  const atLeast = (least, sizes, ...names) => {
    for (const name of names)
      if (sizes[name] < least) refuse(`${name} is a number from ${least}; found ${sizes[name]}`);
  };
  const checkExperts = e => {
    if (!(e.active >= 1 && e.active <= e.count))
      refuse(`a token goes to 1 to ${e.count} of ${e.count} experts; found active=${e.active}`);
    atLeast(0, e, "shared", "capacity", "auxiliary");
  };
  const checkDecoder = c => {
    const {embed, heads, groups, latent, rotary, layers, period, remat} = c;
    atLeast(1, c, "period");
    atLeast(0, c, "groups", "latent", "rotary");
    if (groups && heads % groups) refuse(`${heads} heads do not divide into ${groups} groups`);
    if (latent && groups) refuse("keys and values come from groups of heads or from a latent; "
      + `found groups=${groups} and latent=${latent}`);
    if (rotary && !latent) refuse(`rotary=${rotary} is for latent attention; found latent=0`);
    const turned = latent ? rotary : floor(embed, heads);
    if (turned % 2) refuse(`rotary positions turn pairs of numbers; found ${turned}`);
    oneOf("remat", data.policies, remat);
    if (layers % period) refuse(`${layers} layers do not divide into periods of ${period}`);
  };
  // What the constructors of configs refuse.
  const check = c => {
    const share = 256 * c.dropout;
    if (c.experts) checkExperts(c.experts);
    if (c.image % c.patch)
      refuse(`an image of ${c.image} pixels is not cut evenly by patches of ${c.patch}`);
    if ("vocabulary" in c) atLeast(1, c, "vocabulary", "tokens");
    atLeast(1, c, "embed", "hidden", "heads", "layers");
    if (c.embed % c.heads) refuse(`embed D=${c.embed} does not divide into ${c.heads} heads`);
    if (share && !(share > 0.5 && share < 255.5)) refuse(
      `dropout is a share in [0, 1), rounded to a 256th, and not to 0; found ${c.dropout}`);
    if ("period" in c) checkDecoder(c);
  };
  // A model's sizes, as its config has them, what follows from them, and `once`, which keeps what
  // was found of them. model: such as "ViT"; sizes: those that are not the config's own defaults.
  const configOf = (model, sizes) => {
    const given = {...data.configs[model], ...sizes, model, once: cached()};
    const experts = given.experts && {...data.experts, ...given.experts}, c = {...given, experts};
    check(c);
    return {
      ...c, number: data.dtypes[c.dtype], head_size: floor(c.embed, c.heads),
      ...("vocabulary" in c ? {padded: up(c.vocabulary, data.constants.PADDED)}
        : {tokens: floor(c.image, c.patch) ** 2 + 1})};
  };
  // The slots of an expert for a row.
  const capacity = (factor, tokens, active, experts) => {
    const slots = Math.ceil(Number((factor * active * tokens / experts).toFixed(9)));
    if (slots < 1)
      refuse(`expected a capacity of 1 or more slots; found ${slots}, a factor of ${factor} for `
        + `${active} choices of ${tokens} tokens and ${experts} experts`);
    return Math.min(slots, tokens);
  };
  const fieldsOf = c => {
    const e = c.experts, patches = c.tokens - 1;
    return {...c, patches, ...(e ? {
      experts: e.count, active: e.active, shared: e.shared,
      slots: e.capacity && capacity(e.capacity, c.tokens, e.active, e.count)} : {})};
  };
  // {letter: size} of a model's dimensions, 0 for those that it does not have.
  const sizesOf = c => c.once("sizes", () => {
    const known = fieldsOf(c), sizeOf = word => /^\d+$/.test(word) ? Number(word)
      : word.split("|").map(name => known[name]).find(size => size) ?? 0;
    return mapped(TABLES[c.model].dims, said => product(words(said).map(sizeOf)));
  });
  // A set of flags, with its name.
  const flagged = flags => {
    const known = new Set(flags);
    return Object.assign(known, {key: [...known].sort().join(" ")});
  };
  const NONE = flagged([]);
  const flagsOf = c => {
    const on = {gated: c.gated, bias: c.bias ?? true, latent: c.latent, dropout: c.dropout,
                scores: !c.by_row, shared: c.experts?.shared, biased: c.experts?.biased};
    return Object.keys(on).filter(name => on[name]);
  };
  // What layers with these flags are called as a part of their model.
  const partOf = flags => flags.has("experts") ? "layers with experts"
    : flags.has("positions") ? "layers" : "layers without positions";
  // [[how many layers, their flags]]; "positions" sets them apart, also where nothing else does.
  const kindsOf = c => {
    const flags = flagsOf(c), period = c.period ?? 1, periods = floor(c.layers, period);
    const own = without(flags, ["shared", "biased"]);
    const turned = c.rotary ? ["positions", "turned"] : ["positions"];
    const last = c.experts ? [...flags, "experts"] : [...own, "dense"];
    if (period === 1) return [[periods, [...last, ...turned]]];
    return [[periods * (period - 1), [...own, "dense", ...turned]], [periods, last]];
  };
  const chosen = (rows, flags) => rows.filter(({when}) => when.every(
    word => word[0] === "-" ? !flags.has(word.slice(1)) : flags.has(word)));

  // plans.py

  const planOf = more => ({...data.plan, ...more});
  const where = plan => AXES.filter(axis => plan[axis] > 1)
    .map(axis => `${axis} ${plan[axis]}`).join(", ");
  const how = plan => [
    plan.rules, ...(plan.stage > 1 ? [plan.schedule] : []),
    ...(plan.context > 1 ? [plan.method] : []),
    ...(plan.microbatches > 1 ? [`${plan.microbatches} microbatches`] : []),
    ...(plan.remat ? [`remat ${plan.remat}`] : [])].join(", ");
  const isFullySharded = plan => plan.rules.startsWith("fully_sharded");
  const rulesOf = plan =>
    data.rules[plan.rules][data.between.filter(axis => plan[axis] > 1).join(" ")];

  // step.py

  // {letter: mesh axes}: an axis can split one dimension only, the last that asks for it.
  const specOf = (letters, rules) => {
    const taken = new Set(), found = {};
    for (const letter of [...letters].reverse()) {
      const axes = (rules[letter] ?? []).filter(axis => !taken.has(axis));
      axes.forEach(axis => taken.add(axis));
      found[letter] ??= axes;
    }
    return found;
  };
  // Where arrays lie: sharding rules on a mesh {axis: devices}. along: what splits tokens between
  // products; ways: into how many parts each dimension of an activation is split.
  const layout = (rules, mesh, key) => {
    const [specs, known, several, split, each] = Array.from({length: 5}, cached);
    const {activations, parameters, gradients, moments} = rules;
    const all = {activations, parameters, gradients: {...parameters, ...gradients},
                 moments: {...parameters, ...moments}};
    const spec = (letters, kind) => specs(
      `${letters} ${kind}`, () => specOf(letters, all[kind]));
    const named = (letters, of, kind = "activations") => known(`${letters} ${of} ${kind}`, () =>
      [...of].flatMap(letter => spec(letters, kind)[letter]));
    const over = (letters, of, kind = "activations") => several(`${letters} ${of} ${kind}`, () =>
      named(letters, of, kind).filter(axis => mesh[axis] > 1));
    const devices = axes => product(axes.map(axis => mesh[axis]));
    const parts = (letters, kind = "activations") => split(`${letters} ${kind}`, () =>
      devices(over(letters, letters, kind)));
    const ways = letters => each(letters, () =>
      [...letters].map(letter => devices(over(letters, letter))));
    return {rules, mesh, key, once: cached(), named, over, devices, parts, ways,
            along: over("BTD", "T")};
  };
  const layouts = cached();
  const layoutOf = plan => {
    if (plan.context > 1) oneOf("method", data.methods, plan.method);
    const key = `${plan.rules} ${AXES.map(axis => plan[axis])}`;
    return layouts(key, () => layout(
      rulesOf(plan), Object.fromEntries(AXES.map(axis => [axis, plan[axis]])), key));
  };
  // The flags of a layer with another kind of attention than the config's.
  const attended = (flags, attention) => {
    if (!attention) return flagged(flags);
    oneOf("attention", Object.keys(data.attention), attention);
    return flagged([...without(flags, ["scores"]), ...data.attention[attention]]);
  };

  // The axes along which a row's collectives go: of what it sums over and makes, of the sum that a
  // bias is in, of the tokens that its gradient is summed over, of its moments beside it; and
  // whether rules name such ones.
  const axesOf = ({named, over}, {tokens, inside, summed, made, shape: own}, L) => {
    const letters = tokens + own, shape = L + own;
    return {
      summed: over(letters, summed), made: over(letters, made), inside: over(inside, inside),
      tokens: over(L + letters, tokens),
      owned: without(over(shape, shape, "moments"), over(shape, shape)),
      own: without(named(shape, shape, "moments"), named(shape, shape)).length > 0};
  };
  // A row of a table on one device: in which part of the model, how many layers have it, arrays of
  // the model that are such a parameter, numbers of the parameter by where they lie, FLOPs of its
  // product.
  const placedRow = (lies, sizes, periods, row, part, layers, flags) => {
    const inLayers = flags.size > 0, L = inLayers ? "L" : "", shape = L + row.shape;
    const count = layers * numberOf(row, flags), letters = L + row.tokens + row.shape;
    const size = some => product([...some].map(letter => sizes[letter]));
    const numbers = kind => row.is_parameter
      ? floor(count * size(shape), lies.parts(shape, kind)) : 0;
    const flops = row.is_product ? 2 * count : 0;
    return {
      row, part, flags, inLayers, shape, axes: axesOf(lies, row, L),
      layers: floor(layers, lies.parts(L)),
      leaves: inLayers ? floor(layers, periods) : 1, used: numbers("activations"),
      stored: numbers("parameters"), gradients: numbers("gradients"), moments: numbers("moments"),
      flops: flops && flops * size(letters) / lies.parts(letters),
      useful: flops && flops * size(row.useful || letters) / product(Object.values(lies.mesh))};
  };
  const NUMBERS = ["used", "stored", "gradients", "moments"];
  // The rows of a model's table on a mesh, the sums of their numbers, and the kinds of layers:
  // {part, flags, layers of one device that have them}.
  const placed = (c, lies, rows, attention) => {
    const table = TABLES[c.model], sizes = {...sizesOf(c), B: rows, L: 1};
    const kinds = kindsOf(c).map(([layers, flags]) => [layers, attended(flags, attention)]);
    const own = flagged(flagsOf(c));
    const [first, last] = [[table.first, "embedding"], [table.last, "head"]].map(
      ([some, part]) => chosen(some, own).map(row => [row, part, 1, NONE]));
    const inside = kinds.flatMap(([layers, flags]) =>
      chosen(table.layer, flags).map(row => [row, partOf(flags), layers, flags]));
    const periods = table.stacked ? Math.min(...kinds.map(([layers]) => layers)) : 1;
    const all = [...first, ...inside, ...last].map(
      one => placedRow(lies, sizes, periods, ...one));
    return {
      placed: all, once: cached(),
      kinds: kinds.map(([layers, flags]) => (
        {part: partOf(flags), flags, layers: floor(layers, lies.parts("L"))})),
      numbers: Object.fromEntries(NUMBERS.map(
        name => [name, sum(all.map(each => each[name]))]))};
  };
  // What one device has and does in a step of `rows` (B, of text or images) on all devices.
  const describe = (config, plan, rows) => {
    const table = TABLES[config.model];
    if (plan.remat) oneOf("remat", Object.keys(table.kept), plan.remat);
    const lies = layoutOf(plan), sizes = sizesOf(config), known = cached();
    const attention = plan.attention || (plan.context > 1 ? "blocks" : "");
    const inMicrobatch = {...sizes, B: floor(rows, plan.microbatches)};
    return {
      config, plan, rows, table, layout: lies, sizes,
      ...config.once(`placed ${lies.key} ${rows} ${attention}`,
                     () => placed(config, lies, rows, attention)),
      remat: plan.remat || (config.remat ?? "none"),
      microbatch: floor(floor(rows, lies.parts("B")), plan.microbatches),
      numbersOf: letters => known(letters, () => floor(
        product([...letters].map(letter => inMicrobatch[letter])), lies.parts(letters)))};
  };
  // What experts without a capacity do depends on the tokens.
  const dropless = ({experts}) => experts && !experts.capacity
    ? "what dropless experts do depends on the tokens: expected a capacity above 0" : "";
  const checkSlots = ({config}) => dropless(config) && refuse(dropless(config));

  return {TABLES, NONE, numberOf, configOf, sizesOf, kindsOf, chosen, planOf, where, how,
          isFullySharded, layoutOf, describe, dropless, checkSlots};
}];
