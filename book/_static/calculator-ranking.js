// All meshes of the calculator's machine, each with its best plan, and the chosen one among them.
"use strict";

const meshbookRanking = (costs, home) => {
  const {element, memoryOf, timeOf, table} = meshbookForm, {how, named} = meshbookWords;
  const {tie: TIE, spare: SPARE} = meshbookData.ranking;
  const FIRST = 10, SUCH_AS = 4; // rows of the table that are not folded, meshes of a reason
  const PAUSE = 250, TURN = 12; // milliseconds: before a ranking begins, and of work at a time

  const where = plan => costs.where(plan) || "one device";
  const plans = count => `${count.toLocaleString("en-US")} ${count === 1 ? "mesh" : "meshes"}`;
  // Whether two plans are one to the formulas, whatever their rules are called.
  const isSame = (one, other) => one.step === other.step && one.peak === other.peak
    && where(one.plan) === where(other.plan) && one.plan.remat === other.plan.remat
    && one.plan.microbatches === other.plan.microbatches
    && (one.plan.stage === 1 || one.plan.schedule === other.plan.schedule)
    && (one.plan.context === 1 || one.plan.method === other.plan.method);
  // The ranking with the chosen plan in its place: as itself, or in a row of its own.
  const withChosen = (found, chosen) => {
    if (!chosen) return found;
    const mine = {...chosen, isChosen: true}, at = found.findIndex(each => isSame(each, mine));
    return at < 0 ? costs.inOrder([...found, mine]) : found.with(at, mine);
  };

  const rowOf = ({plan, step, peak, fits, isChosen}, {device: {memory}}, tied) => [
    element("span", {className: isChosen ? "calculator-chosen" : ""}, where(plan),
            element("small", {}, `${how(plan)}${isChosen ? "; your choice" : ""}`)),
    `${timeOf(step)}${fits && step < tied ? ", tie" : ""}`,
    `${memoryOf(peak)}${fits ? "" : peak > memory ? ", does not fit" : ", tight"}`];
  const folded = (className, words, wereOpen, inside) => element(
    "details", {className, open: wereOpen.has(className)}, element("summary", {}, words), inside);
  const because = refused => {
    const reasons = new Map();
    for (const {mesh, why} of refused) reasons.set(why, [...reasons.get(why) ?? [], where(mesh)]);
    const which = meshes => meshes.length <= SUCH_AS ? meshes.join("; ")
      : `${plans(meshes.length)}, such as ${meshes.slice(0, SUCH_AS).join("; ")}`;
    return element("ul", {}, ...[...reasons].map(
      ([why, meshes]) => element("li", {}, `${why}: ${which(meshes)}`)));
  };
  const explained = many => element(
    "p", {className: "calculator-said"}, "Each mesh with its fastest plan among those that leave "
      + `${100 * SPARE}% of the memory free, or with the smallest where none does. A time is the `
      + `sum of the parts of a step, none of which hides another. Times less than ${TIE} times the `
      + `first are in no order${many > 1 ? `: the first ${many} are a tie` : ""}.`);
  const HEAD = ["mesh and plan", "step", "memory"];
  const shown = ({found, refused}, {machine}, chosen, wereOpen) => {
    const all = withChosen(found, chosen), of = named(machine), more = all.length - FIRST;
    const many = all.filter(({fits, step}) => fits && step < TIE * all[0].step).length;
    const rows = (...part) => all.slice(...part).map(
      each => rowOf(each, machine, many > 1 ? TIE * all[0].step : 0));
    const place = all.findIndex(each => each.isChosen) + 1;
    return [
      ...(all.length ? [table(`All meshes of ${of}, the fastest first`, HEAD, rows(0, FIRST)),
                        explained(many)]
        : [element("p", {}, `No mesh of ${of} can train this model with this batch.`)]),
      ...(place > FIRST ? [element("p", {}, `Your choice is number ${place} of ${all.length}.`)]
        : []),
      ...(more > 0 ? [folded("more", `${more} more`, wereOpen,
                             table("The others", HEAD, rows(FIRST)))] : []),
      ...(refused.length ? [folded("why", `${plans(refused.length)} impossible, and why`, wereOpen,
                                   because(refused))] : [])];
  };

  let [latest, timer, found, asked] = ["", 0, null, null];
  const told = element("p", {className: "calculator-told"}), body = element("div");
  home.replaceChildren(told, body);
  const show = () => {
    const {config, machine, plan, rows} = asked;
    const chosen = plan && costs.ranked(config, plan, rows, machine);
    const wereOpen = new Set([...body.querySelectorAll("details[open]")].map(
      each => each.className));
    body.replaceChildren(...shown(found, asked, chosen, wereOpen));
  };
  const ended = words => {
    told.textContent = words;
    home.setAttribute("aria-busy", false);
  };
  // A RangeError's sentence stands in the place of a ranking.
  const tried = make => {
    try { return make(); } catch (error) {
      if (!(error instanceof RangeError)) throw error;
      body.replaceChildren();
      ended(`No ranking: ${error.message}.`);
      return null;
    }
  };
  const ranked = ({config, machine, rows, attention}) => {
    const left = costs.meshes(machine.size), count = left.length, some = {found: [], refused: []};
    const began = performance.now() + PAUSE;
    told.textContent = "";
    const one = mesh => {
      try { some.found.push(costs.bestOn(config, mesh, rows, machine)); } catch (error) {
        if (!(error instanceof costs.Impossible)) throw error;
        some.refused.push({mesh, why: error.message});
      }
    };
    const go = () => tried(() => {
      for (const end = performance.now() + TURN; left.length && performance.now() < end;)
        one({...left.shift(), attention});
      if (left.length) {
        told.textContent = `Ranking: ${count - left.length} of ${plans(count)}`;
        timer = setTimeout(go);
        return;
      }
      found = {...some, found: costs.inOrder(some.found)};
      show();
      ended(`${plans(count)}, ranked in ${timeOf((performance.now() - began) / 1000)}.`);
    });
    timer = setTimeout(go, PAUSE);
  };
  // Takes what is asked for, {config, machine, rows, attention, plan: the chosen one or null}, or
  // null; ranks a little later and a few meshes at a time, so that nobody who types has to wait.
  return now => {
    const key = now ? JSON.stringify([now.config, now.machine, now.rows, now.attention]) : "";
    asked = now;
    if (key === latest) {
      if (found) tried(show);
      return;
    }
    [latest, found] = [key, null];
    clearTimeout(timer);
    home.setAttribute("aria-busy", Boolean(now));
    if (now) return ranked(now);
    body.replaceChildren();
    ended("");
  };
};
