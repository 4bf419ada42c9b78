// All plans for a decoder on so many chips: meshbook.planning.meshes in JavaScript.
// tests/book/test_calculator_plans.py holds its order and its sentences to the Python's.
"use strict";

meshbook.meshes = (() => {
  const {product, sum} = meshbook, {AXES, memory, peak, seconds} = meshbook.plans;
  const WHOLE = ["tensor_parallel", "zero1", "fully_sharded_kept", "fully_sharded_again"];
  const STAGED = ["tensor_parallel", "zero1", "fully_sharded"];
  const POLICIES = ["none", "products", "attention", "all"];
  const SCHEDULES = ["gpipe", "lockstep", "zero_bubble"];
  const SPARE = 0.25; // of a device's memory, for what no formula knows

  // A number as Python's format :g writes it.
  const general = number => {
    const power = number ? Math.floor(Math.log10(Number(number.toPrecision(6)))) : 0;
    if (power < 6) return String(Number(number.toPrecision(6)));
    const [digits] = number.toExponential(5).split("e");
    return `${Number(digits)}e+${String(power).padStart(2, "0")}`;
  };

  // Every mesh of so many chips: all ways to write their number as a product.
  const meshesOf = chips => {
    const sizes = Array.from({length: chips}, (_, at) => at + 1).filter(size => chips % size === 0);
    const rest = AXES.slice(1).reduce(
      found => found.flatMap(some => sizes.filter(size => chips % product([...some, size]) === 0)
        .map(size => [...some, size])), [[]]);
    return rest.map(some => Object.fromEntries(AXES.map(
      (axis, at) => [axis, at ? some[at - 1] : chips / product(some)])));
  };
  // Every way to train on a mesh whose microbatches divide over those that split the rows.
  const plansOn = ({batch, expert, stage, context, model}, rows) => {
    const staged = stage > 1, plans = [];
    for (const rules of staged ? STAGED : WHOLE)
      for (const schedule of SCHEDULES.slice(0, staged ? 3 : 1))
        for (let microbatches = 1; microbatches <= rows; microbatches *= 2)
          if (rows / microbatches % (batch * expert) === 0)
            for (const remat of POLICIES) plans.push(
              {batch, expert, stage, context, model, rules, schedule, microbatches, remat});
    return plans;
  };
  // Why a decoder cannot be trained by a plan with so many rows a step: a sentence, or "".
  const impossible = (c, plan, rows) => {
    const e = c.experts, {batch, expert, stage, context, model, microbatches: parts} = plan;
    if (context > 1) return c.latent
      ? `attention over a context is for keys and values of heads; found latent=${c.latent}`
      : "a context beside other axes has no formula here; see context_costs";
    if (expert > 1 && !e)
      return `a decoder without experts has nothing to split over ${expert} devices`;
    for (const [name, size, ways] of [
      ["heads", c.heads, model], ["hidden", c.hidden, model],
      ["groups", c.groups || c.heads, model], ["periods of layers", c.layers / c.period, stage],
      ["experts", e ? e.count : 0, expert],
      ["hidden units of the shared expert", e ? e.shared : 0, model],
      ["padded vocabulary", c.padded, model * stage],
      ["rows in a microbatch of a batch", rows / parts, batch * expert],
      ["embed", c.embed, plan.rules === "tensor_parallel" ? 1 : batch]])
      if (size % ways) return `${name}=${general(size)} does not divide over ${ways} devices`;
    if (stage > 1 && plan.schedule !== "gpipe" && plan.remat !== "none")
      return `${plan.schedule} keeps what it needs: expected remat none, found ${plan.remat}`;
    if (plan.schedule === "zero_bubble" && parts < stage)
      return `zero_bubble needs a microbatch for each of ${stage} stages; found ${parts}`;
    return "";
  };

  const least = (list, of) => list.reduce((best, each) => of(each) < of(best) ? each : best);
  // The fastest plan on a mesh that fits, or the smallest; {mesh, why} where none is possible.
  const bestOn = (c, mesh, rows, device, torus) => {
    // The plan that asks for least: where it is impossible, all are.
    const easiest = {...mesh, rules: WHOLE[0], schedule: SCHEDULES[0], microbatches: 1,
                     remat: "none"};
    const why = impossible(c, easiest, rows);
    if (why) return {mesh, why};
    const can = plansOn(mesh, rows).filter(plan => !impossible(c, plan, rows));
    const place = meshbook.places.spans(torus, AXES.map(axis => mesh[axis]));
    const all = can.map(plan => {
      const held = memory(c, plan, rows);
      return {plan, held, peak: peak(held), fits: peak(held) <= (1 - SPARE) * device.memory};
    });
    const fitting = all.filter(({fits}) => fits);
    const timed = (fitting.length ? fitting : [least(all, each => each.peak)]).map(each => {
      const spent = seconds(c, each.plan, rows, device, place, each.held);
      return {...each, seconds: spent, step: sum(Object.values(spent))};
    });
    return least(timed, ({step}) => step);
  };
  // {found: the best plan of every possible mesh, those that fit and the fastest first; refused:
  // [{mesh, why}]}. each: what bestOn said of every mesh.
  const sorted = each => ({
    found: each.filter(({why}) => !why).sort(
      (one, other) => other.fits - one.fits || one.step - other.step),
    refused: each.filter(({why}) => why),
  });
  // c: of meshbook.plans.decoder; torus: chips along its three dimensions.
  const rank = (c, rows, device, torus) => sorted(
    meshesOf(product(torus)).map(mesh => bestOn(c, mesh, rows, device, torus)));
  return {rank, sorted, bestOn, meshesOf, impossible, SPARE};
})();
