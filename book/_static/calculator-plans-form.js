// The table of all meshes of a slice of TPUs in the calculator's page; see calculator-form.js.
"use strict";

const meshbookPlans = (() => {
  const {element, memoryOf, timeOf, table} = meshbookForm;
  const sliced = torus => [torus.join("x"),
    `${torus.reduce((all, each) => all * each, 1)}: ${torus.join(" × ")}`];
  const CUBES = [[2, 2, 1], [2, 2, 2], [2, 2, 4], [2, 4, 4]].map(sliced);
  const FLAT = [[2, 2], [2, 4], [4, 4], [4, 8], [8, 8]].map(sliced);
  // Slices in which a device is a chip, and no dimension is a ring: {device: {name: words}}.
  const SLICES = Object.fromEntries([["TPU v4", CUBES], ["TPU v5p", CUBES], ["TPU v5e", FLAT],
    ["TPU v6e", FLAT]].map(([device, slices]) => [device, Object.fromEntries(slices)]));
  const RULES = {tensor_parallel: "whole weights", zero1: "ZeRO-1", fully_sharded: "ZeRO-3",
                 fully_sharded_kept: "ZeRO-3", fully_sharded_again: "ZeRO-3, regather"};
  const SCHEDULES = {gpipe: "GPipe", lockstep: "1F1B, lockstep", zero_bubble: "ZB-H1"};
  const KEPT = {none: "keeps everything", products: "keeps products", attention: "keeps attention",
                all: "keeps its input"};
  const FIRST = 10; // rows of the table that are seen without a click
  const PAUSE = 250, TURN = 12; // milliseconds: before a ranking begins, and of work at a time

  const where = mesh => meshbook.plans.AXES.filter(axis => mesh[axis] > 1).map(
    axis => `${axis} ${mesh[axis]}`).join(", ") || "one device";
  const how = ({rules, stage, schedule, microbatches, remat}) => [
    RULES[rules], ...(stage > 1 ? [SCHEDULES[schedule]] : []),
    ...(microbatches > 1 ? [`${microbatches} microbatches`] : []), KEPT[remat]].join("; ");
  const rows = found => found.map(({plan, step, peak, fits}) => [
    element("span", {}, where(plan), element("small", {}, how(plan))), timeOf(step),
    `${memoryOf(peak)}${fits ? "" : ", no"}`]);
  const folded = (words, isOpen, ...inside) =>
    element("details", {open: isOpen}, element("summary", {}, words), ...inside);

  const shown = ({found, refused}, {device, slice}, wasOpen) => {
    const of = `${slice.split("x").join(" × ")} ${device.name}`;
    const head = ["mesh and plan", "step", "memory"];
    const reasons = refused => {
      const because = {};
      for (const {mesh, why} of refused) (because[why] ??= []).push(mesh);
      return element("ul", {}, ...Object.entries(because).map(([why, meshes]) => element(
        "li", {}, `${why}: ${which(meshes)}`)));
    };
    const isUnknown = ({why}) => why.includes("no formula here");
    const [unknown, impossible] = [refused.filter(isUnknown), refused.filter(each => !isUnknown(each))];
    const which = meshes => meshes.length > 1 && meshes.every(({context}) => context > 1)
      ? `all ${meshes.length} meshes with a context` : meshes.map(where).join("; ");
    return [
      found.length ? table(`All meshes of ${of}, the fastest first`, head, rows(found.slice(0, FIRST)))
        : element("p", {}, `No mesh of ${of} can train this decoder.`),
      ...(found.length ? [element("p", {}, "Each with the fastest plan that leaves a quarter of the "
        + "memory free; “no” where none does.")] : []),
      ...(found.length > FIRST ? [folded(`${found.length - FIRST} more meshes`, wasOpen[0], table(
        "The others", head, rows(found.slice(FIRST))))] : []),
      ...(impossible.length ? [folded(`${impossible.length} meshes are impossible`, wasOpen[1],
                                      reasons(impossible))] : []),
      ...(unknown.length ? [folded(`${unknown.length} meshes with a context are not ranked`, wasOpen[2],
        element("p", {}, "“split context”, a sharding, counts the memory and the collectives of one "
          + "context beside one batch axis."), reasons(unknown))] : []),
    ];
  };

  // The slices of a device as options of a field, which is hidden where there are none.
  const offer = (field, device, wanted) => {
    const slices = SLICES[device] ?? {}, before = wanted ?? field.value;
    field.replaceChildren(...Object.entries(slices).map(
      ([value, words]) => element("option", {value}, words)));
    field.selectedIndex = Object.keys(slices).indexOf(before);
    if (field.selectedIndex < 0) field.selectedIndex = Math.min(1, field.options.length - 1);
    field.disabled = field.parentNode.hidden = !field.options.length;
  };
  const decoder = (sizes, {experts: count, active, shared, capacity}) => meshbook.plans.decoder(
    sizes, count ? {count, active, shared, capacity, auxiliary: 1} : null);

  // A function of a choice of the form, which ranks the meshes a little later and a few at a time,
  // so that nobody who types has to wait.
  const into = home => {
    let [latest, timer] = ["", 0];
    return ({decoder: c, batch, device, slice}) => {
      const asked = JSON.stringify(c ? [{...c, remat: ""}, batch, device.name, slice] : "");
      if (asked === latest) return;
      latest = asked;
      clearTimeout(timer);
      home.setAttribute("aria-busy", Boolean(c));
      if (!c) return home.replaceChildren();
      const torus = [...slice.split("x").map(Number), 1].slice(0, 3);
      const each = [], meshes = meshbook.meshes.meshesOf(torus.reduce((all, one) => all * one, 1));
      const go = () => {
        for (const end = performance.now() + TURN; meshes.length && performance.now() < end;)
          each.push(meshbook.meshes.bestOn(c, meshes.shift(), batch, device, torus));
        if (meshes.length) return timer = setTimeout(go);
        const wasOpen = [...home.querySelectorAll("details")].map(({open}) => open);
        home.replaceChildren(...shown(meshbook.meshes.sorted(each), {device, slice}, wasOpen));
        home.setAttribute("aria-busy", false);
      };
      timer = setTimeout(go, PAUSE);
    };
  };
  return {SLICES, offer, decoder, into};
})();
