// How long a step takes: meshbook.costs.seconds in JavaScript.
"use strict";

meshbook.costs.parts.push((data, known) => {
  const {sum} = meshbook;
  const {refuse} = meshbook.costs.helpers;
  const {DRAWN, LANES, OF_BOUNDS, OF_ESTIMATE} = data.constants;
  const {alongAll, linkSeconds, passesOf, slotsOf, stepWork, leastWork, stepTraffic, sizeOf,
    keptBytes, stepMemory} = known;

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

  return {bytesMoved, bytesAtLeast, numbersDrawn, axisSeconds, stepSeconds, bounds,
          likelySeconds};
});
