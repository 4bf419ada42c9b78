// Every tensor of a model on a mesh, and what each part of the model sends in a step:
// meshbook.costs.explorer in JavaScript. tests/book/test_explorer_page.py holds it to Python.
"use strict";

meshbook.costs.parts.push((data, known) => {
  const {product} = meshbook, {floor, refuse} = meshbook.costs.helpers;
  const {parts: PARTS, passes: PASSES, of_all: OF_ALL} = data.explorer;
  const {numberOf, describe, impossible, sent, added} = known;

  // [of what kind of plan a model's is, the presets whose bytes are known with such a plan]
  const knownPresets = ({model, experts}, {stage, microbatches}) => {
    const {whole, staged} = data.ranking;
    if (model !== "Decoder") return ["of this model", OF_ALL];
    if (stage > 1) return ["in stages", ["data_parallel", ...staged]];
    if (experts) return ["with experts", ["data_parallel", ...whole]];
    if (microbatches > 1)
      return ["of microbatches", ["data_parallel", "fully_sharded", ...whole]];
    return ["on such a mesh", Object.keys(data.rules)];
  };
  const unknown = (config, plan) => {
    const [kind, presets] = knownPresets(config, plan);
    return presets.includes(plan.rules) ? ""
      : `bytes ${kind} are known with ${presets.join(", ")}; found ${plan.rules}`;
  };
  // The step of a plan that the explorer knows; a RangeError that says why it does not.
  const explored = (config, plan, rows) => {
    const why = impossible(config, plan, rows) || unknown(config, plan);
    return why ? refuse(why) : describe(config, plan, rows);
  };

  const tensor = (step, {row, part, flags}, letters, kind, number, arrays, more) => {
    const sizes = {...step.sizes, S: numberOf(row, flags), ...more}, {named, devices} = step.layout;
    const shape = [...letters].map(letter => sizes[letter]);
    const spec = [...letters].map(letter => named(letters, letter, kind));
    const held = shape.map((size, at) => floor(size, devices(spec[at])));
    return {part, name: row.name, letters, shape, spec, held, bytes: number * product(held), arrays,
            isParameter: kind !== "activations", isMatrix: row.summed !== ""};
  };
  // kind: "gradients" or "moments" for where those lie, which have the parameters' shapes.
  const parameters = (step, kind = "parameters") => step.placed
    .filter(({row}) => row.is_parameter).map(each => {
      const {row: {name, title}, layers, leaves, inLayers} = each;
      const letters = (inLayers && step.table.stacked ? "L" : "") + name.slice(title.length + 1);
      const L = floor(layers * step.layout.parts("L"), leaves);
      return tensor(step, each, letters, kind, 4, leaves, {L});
    });
  // What parameters make of a microbatch; not the logits of texts, which come in chunks.
  const activations = step => step.placed
    .filter(({row}) => row.is_parameter && row.output && !row.output.includes("V"))
    .map(each => {
      const layers = each.layers * (each.inLayers ? step.layout.parts("L") : 1);
      return tensor(step, each, each.row.output, "activations", step.config.number, layers,
                    {B: floor(step.rows, step.plan.microbatches)});
    });
  // What each part of a model sends in a step, lines of the same words as one.
  const exchanges = (step, clipped = false) => added(
    sent(step, step.config.number, clipped),
    ({part, when, what, kind, axes}) => ({part, when, what, kind, axes}),
  ).sort((one, other) => PARTS.indexOf(one.part) - PARTS.indexOf(other.part)
    || PASSES.indexOf(one.when) - PASSES.indexOf(other.when));
  // A tensor's name as the book writes it: mlp/w_in[D_batch, F_model].
  const notation = ({name, letters, spec, isParameter}) => {
    const dimensions = [...letters].map((letter, at) => [letter, ...spec[at]].join("_"));
    return `${name.slice(0, name.lastIndexOf("_"))}${isParameter ? "" : " makes "}`
      + `[${dimensions.join(", ")}]`;
  };

  return {explored, parameters, activations, exchanges, notation};
});
