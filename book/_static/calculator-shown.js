// What the calculator says of a plan: whether it fits, memory over a step, work, collectives, time.
"use strict";

const meshbookShown = costs => {
  const PARTS = meshbookParts; // {kind of memory: [words, colour]}, from the bottom upwards
  const {element, digits, memoryOf, sentOf, flopsOf, timeOf, table} = meshbookForm;
  const {timeline, whole} = meshbookTimeline, {spare: SPARE} = meshbookData.ranking;
  const {OF_BOUNDS, OF_ESTIMATE} = meshbookData.constants;
  const said = words => element("p", {className: "calculator-said"}, words);

  // ["yes", "tight" or "no", a sentence]: SPARE of a device's memory should stay free.
  const verdict = (peak, memory) => {
    const share = `${memoryOf(peak)} of ${memoryOf(memory)} on each device`;
    if (peak > memory) return ["no", `Does not fit: ${share}`];
    return peak > (1 - SPARE) * memory
      ? ["tight", `Tight: ${share}, of which ${100 * SPARE}% should stay free for the compiler`]
      : ["yes", `Fits: ${share}`];
  };

  const place = ({phase, block}) => block === null ? `in the ${phase}`
    : `in the ${phase} pass of ${block ? `layer ${block}` : "the embedding"}`;
  const swatch = colour => {
    const made = element("span", {className: "calculator-swatch"});
    made.style.background = colour;
    return made;
  };
  // The timeline, a slider for its moments, and the bytes at the moment that is chosen.
  const overTime = (moments, limit, words) => {
    const totals = moments.map(whole), top = totals.indexOf(Math.max(...totals));
    const [art, moveTo] = timeline(moments, limit, `Memory of a device over a step. ${words}, `
      + `${place(moments[top])}. The dashed line is the device's memory.`);
    const slider = element("input", {type: "range", min: 0, max: totals.length - 1, value: top});
    const told = element("p", {className: "calculator-told"});
    const most = kind => Math.max(...moments.map(({held}) => held[kind]));
    const kinds = Object.keys(PARTS).filter(most).reverse();
    const bytes = table("Memory of each device", ["what", "at most", "at this moment"],
      kinds.map(kind => [element("span", {}, swatch(PARTS[kind][1]), PARTS[kind][0]),
                         memoryOf(most(kind)), ""]));
    const cells = bytes.querySelectorAll("td:last-child");
    const show = () => {
      const at = Number(slider.value), moment = moments[at];
      const words = `${memoryOf(totals[at])} ${place(moment)}${at === top ? ": the peak" : ""}`;
      kinds.forEach((kind, row) => { cells[row].textContent = memoryOf(moment.held[kind]); });
      slider.setAttribute("aria-valuetext", words);
      told.textContent = words;
      moveTo(at);
    };
    slider.addEventListener("input", show);
    show();
    return [art, element("label", {className: "calculator-moment"},
                         element("span", {}, "Moment of the step"), slider), told, bytes];
  };

  const worked = (step, devices) => {
    const {useful, done} = costs.stepWork(step);
    return table("Work of a step", ["what", "FLOPs"], [
      ["useful, of all devices", flopsOf(useful * devices)],
      ["executed by each device", flopsOf(done)],
      ["executed, as a multiple of useful", `${digits(done / useful)} ×`]]);
  };
  const sent = (step, device, groups) => {
    const all = costs.stepTraffic(step, step.config.number).map(({kind, axes, bytes}) => [
      `${kind} along ${axes.join(", ")}`, sentOf(bytes), timeOf(costs.linkSeconds(
        kind, costs.alongAll(axes.map(axis => groups[axis])), bytes, device))]);
    return all.length ? table("Collectives of a step",
      ["what", "results on each device", "time on the links"], all)
      : said("This step has no collectives.");
  };
  const LIMITS = {compute: "compute", memory: "traffic to memory",
                  links: "links of its busiest axis"};
  const bounded = least => {
    const slowest = Math.max(...Object.values(least));
    const longest = Object.keys(least).find(name => least[name] === slowest);
    const rows = Object.entries(least).map(([name, seconds]) => {
      const piece = element("span", {className: "calculator-floor"});
      piece.style.width = `${100 * seconds / slowest}%`;
      return [LIMITS[name], timeOf(seconds), piece];
    });
    return [table("Lower bounds of a step", ["limited by", "at least", ""], rows), said(
      `No program that computes, moves and sends what is counted here takes less than `
      + `${timeOf(slowest)}, because of its ${LIMITS[longest]}. Attention over text is counted for `
      + "the pairs of tokens that the causal mask leaves.")];
  };
  // Where the range of likely times comes from.
  const reason = ({switch: isGPU}) => isGPU
    ? `The likely time is ${OF_BOUNDS.join(" to ")} times the sum of the three bounds: so are all `
      + "ten published steps on GPUs that this page lists."
    : `The likely time is ${OF_ESTIMATE.join(" to ")} times an estimate that follows the clock of `
      + "the TPU's compiler: eight of ten published times of programs are so many of that clock's.";

  // What a reader should know of a memory by formula.
  const limits = ({plan, table}) => plan.remat === "none" && table.stacked ? [said(
    "“Everything” is what this book's loop of layers keeps. The backward pass of PyTorch needs "
    + "about half of it: see the published steps below.")] : [];

  // {verdict: elements that are the answer, details: what it follows from}
  return ({config, machine, plan, rows}) => {
    const {device} = machine, groups = costs.groupsOf(machine, costs.sizesOn(plan));
    const step = costs.describe(config, plan, rows), isTPU = !device.switch;
    const [kind, words] = verdict(costs.stepPeak(step, isTPU), device.memory);
    const range = new Set(costs.likelySeconds(step, device, groups).map(timeOf));
    return {
      verdict: [element("p", {className: `calculator-verdict calculator-${kind}`}, words),
                element("p", {className: "calculator-likely"}, "A step is likely to take ",
                        ...[...range].flatMap((time, at) => [at ? " to " : "", element(
                          "span", {className: "calculator-time"}, time)]))],
      details: [...limits(step), ...overTime(costs.stepTimeline(step, isTPU), device.memory, words),
                worked(step, machine.size), sent(step, device, groups),
                ...bounded(costs.bounds(step, device, groups)), said(reason(device))]};
  };
};
