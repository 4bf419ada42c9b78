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

  return {SIZES, PRESETS, element, drawn, commas};
})();
