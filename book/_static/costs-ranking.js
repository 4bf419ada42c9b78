// All plans for a training run on so many chips: meshbook.costs.ranking in JavaScript.
"use strict";

meshbook.costs.parts.push((data, known) => {
  const {product, sum} = meshbook, {axes: AXES} = data;
  const {floor, upTo} = meshbook.costs.helpers, {spare: SPARE, divided: DIVIDED} = data.ranking;
  const {TABLES, sizesOf, planOf, layoutOf, describe, dropless} = known;
  const {stepPeak, stepSeconds, groupsOf} = known;
  class Impossible extends RangeError {} // no plan on a mesh is possible

  // Every mesh of so many chips, as plans: all ways to write their number as a product.
  const meshes = chips => {
    const sizes = upTo(chips, 1).filter(size => chips % size === 0);
    const rest = AXES.slice(1).reduce(found => found.flatMap(some => sizes
      .filter(size => chips % product([...some, size]) === 0).map(size => [...some, size])), [[]]);
    return rest.map(some => planOf(Object.fromEntries(
      AXES.map((axis, at) => [axis, at ? some[at - 1] : chips / product(some)]))));
  };
  // Every way to train on a mesh: rules, schedules, powers of two of microbatches, remat.
  const plansOn = (mesh, most = 64, whole = data.ranking.whole) => {
    const {staged, schedules, policies, methods} = data.ranking, plans = [];
    for (const rules of mesh.stage > 1 ? staged : whole)
      for (const schedule of mesh.stage > 1 ? schedules : schedules.slice(0, 1))
        for (let microbatches = 1; microbatches <= most; microbatches *= 2)
          for (const remat of policies)
            for (const method of mesh.context > 1 ? methods : methods.slice(0, 1))
              plans.push({...mesh, rules, schedule, microbatches, remat, method});
    return plans;
  };
  // Into how many parts each dimension is split, where it is split most.
  const waysOf = lies => lies.once("ways", () => Object.keys(DIVIDED).map(letter => [
    letter, Math.max(...["activations", "parameters", "moments"].map(
      kind => lies.devices(lies.over(letter, letter, kind))))]));
  // What of a model and its rows does not divide over a mesh: a sentence, or "".
  const undivided = (config, lies, rows) => config.once(`undivided ${lies.key} ${rows}`, () => {
    const sizes = {...sizesOf(config), B: rows, L: floor(config.layers, config.period ?? 1)};
    const found = waysOf(lies).find(([letter, ways]) => (sizes[letter] ?? 0) % ways);
    return found ? `${DIVIDED[found[0]]}=${sizes[found[0]]} does not divide over `
      + `${found[1]} devices` : "";
  });
  // Why a model cannot be trained by a plan with so many rows a step: a sentence, or "".
  const impossible = (config, plan, rows) => {
    const lies = layoutOf(plan), policies = TABLES[config.model].kept;
    if (plan.expert > 1 && !config.experts)
      return `a model without experts has nothing to split over ${plan.expert} devices`;
    if (rows % plan.microbatches)
      return `${rows} rows do not divide into ${plan.microbatches} microbatches`;
    const why = undivided(config, lies, rows / plan.microbatches);
    if (why) return why;
    const remat = plan.remat || (config.remat ?? "none");
    if (!(remat in policies))
      return `remat is one of ${Object.keys(policies).join(", ")}; found '${remat}'`;
    if (dropless(config)) return dropless(config);
    if (config.model !== "Decoder") {
      if (plan.stage * plan.context > 1)
        return "stages and a context have programs for the decoder only";
      if (!["data_parallel", ...data.ranking.compiled].includes(plan.rules))
        return `${plan.rules} has a program for the decoder only`;
    }
    if (plan.stage > 1) return inStages({...plan, remat});
    return plan.context > 1 ? withContext(config, plan) : "";
  };
  const inStages = ({context, stage, schedule, microbatches, remat}) => {
    if (context > 1) return "a context in stages has no program here";
    if (!data.schedules.includes(schedule))
      return `expected a schedule, one of ${data.schedules.join(", ")}; found '${schedule}'`;
    if (schedule !== "gpipe" && remat !== "none")
      return `${schedule} keeps what it needs: expected remat none, found ${remat}`;
    if (schedule === "zero_bubble" && microbatches < stage)
      return `zero_bubble needs a microbatch for each of ${stage} stages; found ${microbatches}`;
    return "";
  };
  const withContext = (config, plan) => {
    const ways = plan.context * plan.model, groups = config.groups || config.heads;
    if (config.latent) return "attention over a context is for keys and values of heads; found "
      + `latent=${config.latent}`;
    if (config.experts)
      return "experts beside a context have no program here: their slots are of whole rows";
    if (!["", "blocks", "fused", "skipped"].includes(plan.attention))
      return `a context has attention in blocks, or fused; found '${plan.attention}'`;
    if (plan.method === "ulysses" && groups % ways)
      return `groups=${groups} does not divide over ${ways} devices, as Ulysses asks`;
    return "";
  };
  const fitted = (step, device) => {
    const most = stepPeak(step, !device.switch);
    return {step, peak: most, fits: most <= (1 - SPARE) * device.memory};
  };
  const timed = ({step, ...found}, device, groups) => {
    const spent = stepSeconds(step, device, groups);
    return {plan: step.plan, seconds: spent, step: sum(Object.values(spent)), ...found,
            wire: sum(AXES.filter(axis => axis in spent).map(axis => spent[axis]))};
  };
  const sizesOn = plan => Object.fromEntries(AXES.map(axis => [axis, plan[axis]]));
  // A plan by formula: {plan, seconds: by what they are spent on, step and wire: sums of them,
  // peak: bytes of one device, fits}.
  const ranked = (config, plan, rows, machine) => timed(
    fitted(describe(config, plan, rows), machine.device), machine.device,
    groupsOf(machine, sizesOn(plan)));
  const least = (list, of) => list.reduce((best, each) => of(each) < of(best) ? each : best);
  // What is refused is impossible.
  const orImpossible = make => {
    try { return make(); } catch (error) {
      throw error instanceof RangeError ? new Impossible(error.message) : error;
    }
  };
  // The fastest plan on a mesh that fits, the smallest if none does. Throws an Impossible where no
  // plan is possible, with the sentence of `impossible`, or where slices do not divide the mesh.
  const bestOn = (config, mesh, rows, machine) => {
    const most = Math.max(1, floor(rows, mesh.batch * mesh.expert));
    const {whole, compiled} = data.ranking;
    const plans = plansOn(mesh, most, config.model === "Decoder" ? whole : compiled);
    // What the first plan's rules do not divide, no other's do.
    const isHopeless = undivided(config, layoutOf(plans[0]), rows);
    const can = isHopeless ? [] : plans.filter(plan => !impossible(config, plan, rows));
    if (!can.length) throw new Impossible(impossible(config, plans[0], rows));
    const {device} = machine, groups = orImpossible(() => groupsOf(machine, sizesOn(mesh)));
    const all = can.map(plan => fitted(describe(config, plan, rows), device));
    const fitting = all.filter(({fits}) => fits);
    return least((fitting.length ? fitting : [least(all, each => each.peak)]).map(
      each => timed(each, device, groups)), ({step}) => step);
  };
  const inOrder = found => found.sort(
    (one, other) => other.fits - one.fits || one.step - other.step);
  // {found: the best plan of every possible mesh, fastest first, those that fit before all others;
  // refused: [{mesh, why}]}
  const rank = (config, rows, machine, attention = "") => {
    if (rows < 1) throw new RangeError(`expected at least one row in a step; found ${rows}`);
    const found = [], refused = [];
    for (const each of meshes(machine.size)) {
      const mesh = {...each, attention};
      try {
        found.push(bestOn(config, mesh, rows, machine));
      } catch (error) {
        if (!(error instanceof Impossible)) throw error;
        refused.push({mesh, why: error.message});
      }
    }
    return {found: inOrder(found), refused};
  };

  return {Impossible, sizesOn, meshes, plansOn, impossible, ranked, bestOn, inOrder, rank};
});
