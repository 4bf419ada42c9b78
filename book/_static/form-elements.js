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

  const digits = number => number >= 1e7 ? number.toExponential(2).replace("e+", " × 10^")
    : number >= 100 ? commas(number) : Number(number.toPrecision(3)).toString();
  const scaled = (number, units, step) => {
    let at = 0;
    while (number >= step && at < units.length - 1) [number, at] = [number / step, at + 1];
    return `${digits(number)} ${units[at]}`;
  };
  const memoryOf = bytes => scaled(bytes, ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"], 1024);
  const timeOf = seconds => scaled(seconds * 1e12, ["ps", "ns", "µs", "ms", "s"], 1000);
  const table = (caption, head, rows) => element("table", {className: "table"},
    element("caption", {}, caption),
    element("thead", {}, element("tr", {}, ...head.map(
      words => element("th", {scope: "col"}, words)))),
    element("tbody", {}, ...rows.map(row => element("tr", {}, ...row.map((cell, at) =>
      element(at ? "td" : "th", at ? {} : {scope: "row"}, cell))))));

  return {SIZES, PRESETS, element, drawn, commas, digits, scaled, memoryOf, timeOf, table};
})();
