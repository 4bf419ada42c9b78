// What the forms of the calculator and of the explorer share: models, presets, elements of a page.
"use strict";

const meshbookForm = (() => {
  const SIZES = {
    ViT: {image: 32, patch: 4, classes: 10, embed: 384, hidden: 1536, heads: 8, layers: 6},
    MiniGPT: {vocabulary: 50257, tokens: 256, embed: 256, hidden: 256, heads: 8, layers: 4},
  };
  const PRESETS = {data_parallel: "data parallel", tensor_parallel: "tensor parallel",
                   fully_sharded: "fully sharded"};

  const element = (tag, properties = {}, ...children) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(properties))
      name in made ? made[name] = value : made.setAttribute(name, value);
    made.append(...children);
    return made;
  };
  const drawn = (tag, attributes, ...children) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  };
  const commas = number => Math.round(number).toLocaleString("en-US");

  // Three digits that count, with commas: 0.0123, 12.3, 1,230.
  const rounded = number => Number(number.toPrecision(3));
  const digits = number => number >= 100 ? commas(rounded(number))
    : number < 5e-4 ? "0" : String(rounded(number));
  const scaled = (number, units, step) => {
    let at = 0;
    const isMore = () => Math.max(number, rounded(number)) >= step;
    while (isMore() && at < units.length - 1) [number, at] = [number / step, at + 1];
    return rounded(number) >= 1e4 ? `over 10,000 ${units[at]}` : `${digits(number)} ${units[at]}`;
  };
  const units = (unit, prefixes) => [...prefixes].map(prefix => prefix + unit);
  const MEMORY = ["B", ...units("iB", "KMGTPEZYRQ")], SENT = ["B", ...units("B", "kMGTPEZYRQ")];
  const WORK = ["FLOPs", ...units("FLOPs", "kMGTPEZYRQ")], TIME = [...units("s", "µm"), "s"];
  const MANY = ["", "thousand", "million", "billion", "trillion", "quadrillion"];
  const memoryOf = bytes => scaled(bytes, MEMORY, 1024);
  const sentOf = bytes => scaled(bytes, SENT, 1000);
  const flopsOf = flops => scaled(flops, WORK, 1000);
  const countOf = number => scaled(number, MANY, 1000);
  const LONG = 9995, HOUR = 3600, YEAR = 365.25 * 24 * HOUR; // seconds
  const timeOf = seconds => {
    if (seconds < 1e-6) return seconds ? "under 1 µs" : "0";
    if (seconds < LONG) return scaled(seconds * 1e6, TIME, 1000);
    return seconds < LONG * HOUR ? scaled(seconds / HOUR, ["hours"])
      : scaled(seconds / YEAR, ["years"]);
  };
  const table = (caption, head, rows) => element("table", {className: "table"},
    element("caption", {}, caption),
    element("thead", {}, element("tr", {}, ...head.map(
      words => element("th", {scope: "col"}, words)))),
    element("tbody", {}, ...rows.map(row => element("tr", {}, ...row.map((cell, at) =>
      element(at ? "td" : "th", at ? {} : {scope: "row"}, cell))))));

  return {SIZES, PRESETS, element, drawn, digits, commas, memoryOf, sentOf, flopsOf, countOf,
          timeOf, table};
})();
