// The turns of a step, and its work: meshbook.costs.turns and .work in JavaScript.
"use strict";

meshbook.costs.parts.push((data, known) => {
  const {product, sum} = meshbook;
  const {refuse} = meshbook.costs.helpers;
  const {SIDE} = data.constants;
  const {checkSlots} = known;

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

  return {turnsOf, turns, passesOf, slotsOf, stepWork, leastWork};
});
