// The sharding explorer: meshbook.planning.explorer in JavaScript. It needs calculator.js, which
// says where a mesh does not divide sizes. tests/book/test_explorer_page.py holds it to Python.
"use strict";

const meshbookExplorer = (() => {
  const CHUNK = 512; // tokens of one device whose logits are there at once
  const product = numbers => numbers.reduce((all, each) => all * each, 1);
  const sum = numbers => numbers.reduce((all, each) => all + each, 0);

  // Over which mesh axis each letter is split, of activations and, beside that, of parameters.
  const PRESETS = {
    data_parallel: {B: "batch"},
    tensor_parallel: {B: "batch", H: "model", F: "model", V: "model"},
    fully_sharded: {B: "batch", H: "model", F: "model", V: "model"},
  };
  const OF_PARAMETERS = {fully_sharded: {D: "batch"}};

  // A mesh axis splits one dimension of a tensor only: the last that asks for it.
  const specOf = (letters, rules) => {
    const taken = new Set(), spec = [];
    for (const letter of [...letters].reverse()) {
      const axis = rules[letter] ?? null;
      spec.unshift(axis !== null && !taken.has(axis) ? axis : null);
      taken.add(axis);
    }
    return spec;
  };

  // [layer, name, is it a parameter], in the order of the forward pass; a name ends with letters.
  const norm = (layer, name) => [`${name}/scale_D`, `${name}/bias_D`].map(each => [layer, each, true]);
  const attention = ["w_qkv_DSHK", "b_qkv_SHK", "w_out_HKD", "b_out_D"]
    .map(name => ["block", `attention/${name}`, true]);
  const mlp = ["w_in_DF", "b_in_F", "w_out_FD", "b_out_D"].map(name => ["block", `mlp/${name}`, true]);
  const inside = [["block", "query_BTHK", false], ["block", "hidden_BTF", false],
                  ["block", "x_BTD", false]];
  const MODELS = {
    ViT: [
      ["embedding", "w_patch_XD", true], ["embedding", "b_patch_D", true],
      ["embedding", "class_D", true], ["embedding", "position_TD", true],
      ["embedding", "x_BTD", false],
      ...norm("block", "norm1"), ...attention, ...norm("block", "norm2"), ...mlp, ...inside,
      ...norm("head", "norm"), ["head", "w_head_DC", true], ["head", "b_head_C", true],
      ["head", "logits_BC", false]],
    MiniGPT: [
      ["embedding", "token_VD", true], ["embedding", "position_TD", true],
      ["embedding", "x_BTD", false],
      ...attention, ...norm("block", "norm1"), ...mlp, ...norm("block", "norm2"), ...inside,
      ["head", "w_head_DV", true], ["head", "b_head_V", true]],
  };

  const lengths = ({model, sizes: c, batch}) => ({
    B: batch, S: 3, D: c.embed, H: c.heads, K: c.embed / c.heads, F: c.hidden,
    ...(model === "ViT" ? {T: (c.image / c.patch) ** 2 + 1, X: 3 * c.patch ** 2, C: c.classes}
      : {T: c.tokens, V: Math.ceil(c.vocabulary / 128) * 128}),
  });

  const tensorsOf = choice => {
    const length = lengths(choice), mesh = {batch: choice.rows, model: choice.across};
    return MODELS[choice.model].map(([layer, name, isParameter]) => {
      const letters = name.slice(name.lastIndexOf("_") + 1);
      const rules = {...PRESETS[choice.preset],
                     ...(isParameter ? OF_PARAMETERS[choice.preset] : {})};
      const spec = specOf(letters, rules), shape = [...letters].map(letter => length[letter]);
      const held = shape.map((size, at) => spec[at] ? size / mesh[spec[at]] : size);
      return {layer, name, letters, shape, spec, held, bytes: 4 * product(held), isParameter};
    });
  };

  const alongModel = (choice, {T, D}) => {
    const gpt = choice.model === "MiniGPT", L = choice.sizes.layers;
    const tokens = choice.batch / choice.rows * T, size = 4 * tokens * D;
    const reduce = (layer, when, what, count, bytes) =>
      ({layer, when, what, kind: "all-reduce", axis: "model", count, bytes});
    const ends = [
      reduce("embedding", "forward", "embeddings, each from the device that has it", 1, size),
      reduce("head", "forward", "maximum and sums of the softmax, per token",
             2 * Math.ceil(tokens / CHUNK), 4 * 3 * tokens),
      reduce("head", "backward", "gradient of the hidden states", 1, size),
      reduce("optimizer", "update", "squared norms of split gradients", 1, 4 * (6 * L + 3))];
    return [
      reduce("block", "forward", "partial sums of attention and MLP", 2, 2 * size),
      reduce("block", "backward", "gradients of what enters attention and MLP", 2, 2 * size),
      ...(gpt ? ends : [])];
  };

  // Local gradients have the shape that their products need, whatever splits the weights.
  const alongBatch = (choice, tensors, sharded) => {
    const gpt = choice.model === "MiniGPT", {rows, sizes} = choice, found = [];
    const move = (layer, when, what, kind, count, bytes) =>
      found.push({layer, when, what, kind, axis: "batch", count, bytes});
    for (const layer of ["embedding", "block", "head"]) {
      const own = tensors.filter(each => each.isParameter && each.layer === layer);
      const split = own.filter(({spec}) => spec.includes("batch"));
      const whole = sum(own.map(each => each.bytes * (split.includes(each) ? rows : 1)));
      // The class token's gradient is the first of the positions'.
      const twice = !gpt && layer === "embedding" ? 4 * sizes.embed : 0;
      if (sharded && split.length)
        move(layer, "forward", "weights, kept for the backward pass", "all-gather", split.length,
             rows * sum(split.map(({bytes}) => bytes)));
      move(layer, "backward", "gradients of the weights", "all-reduce", null, whole - twice);
    }
    move("head", "forward", "loss and accuracy", "all-reduce", null, 8);
    if (sharded && gpt)
      move("optimizer", "update", "squared norms of split gradients", "all-reduce", null,
           4 * (10 * sizes.layers + 3));
    return found;
  };

  const LAYERS = ["embedding", "block", "head", "optimizer"], WHEN = ["forward", "backward", "update"];

  // choice: as for meshbook.estimate. exchanges: of one block, and of what is there once; held,
  // parameters: bytes of all of them, on one device and together.
  const explore = choice => {
    const found = meshbook.estimate(choice); // a RangeError where the mesh does not divide
    const tensors = tensorsOf(choice), {rows, across, preset, sizes} = choice;
    const exchanges = [
      ...(preset !== "data_parallel" && across > 1 ? alongModel(choice, lengths(choice)) : []),
      ...(rows > 1 ? alongBatch(choice, tensors, preset === "fully_sharded") : [])];
    exchanges.sort((one, other) => LAYERS.indexOf(one.layer) - LAYERS.indexOf(other.layer)
      || WHEN.indexOf(one.when) - WHEN.indexOf(other.when));
    const times = ({layer}) => layer === "block" ? sizes.layers : 1;
    const parameters = tensors.filter(({isParameter}) => isParameter);
    const total = bytes => sum(parameters.map(each => times(each) * bytes(each)));
    const moved = {};
    for (const each of exchanges) {
      const key = `${each.kind} along ${each.axis}`;
      moved[key] = (moved[key] ?? 0) + times(each) * each.bytes;
    }
    return {tensors, exchanges, moved, traffic: found.traffic,
            held: total(({bytes}) => bytes), parameters: total(({shape}) => 4 * product(shape))};
  };

  return {explore};
})();
