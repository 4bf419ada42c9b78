// The calculator's form: its fields, what is read of them, and the address that keeps them.
"use strict";

const meshbookCalculator = home => {
  const {element, countOf} = meshbookForm, words = meshbookWords;
  const costs = meshbook.costs(meshbookData), {models: MODELS, slices: SLICES} = meshbookData;
  const AXES = meshbookData.axes, {refuse} = meshbook.costs.helpers;
  const product = numbers => numbers.reduce((all, each) => all * each, 1);
  const MANY = 1e9, DEVICES = 16384;
  const NUMBERS = { // {field: [words, least, most]} of whole numbers
    gpus: ["GPUs", 1, DEVICES], slices: ["Slices", 1, 64],
    rows: ["Batch, all devices", 1, MANY], ...Object.fromEntries(AXES.map(
      axis => [axis, [`Mesh: ${axis}`, 1, DEVICES]])),
    microbatches: ["Microbatches", 1, MANY], image: ["Image side, pixels", 1, MANY],
    patch: ["Patch side, pixels", 1, MANY], classes: ["Classes C", 1, MANY],
    vocabulary: ["Vocabulary V", 1, MANY], tokens: ["Tokens T", 1, MANY],
    embed: ["Embed D", 1, MANY], hidden: ["Hidden F", 1, MANY], heads: ["Heads H", 1, MANY],
    groups: ["Groups, or 0", 0, MANY], layers: ["Layers L", 1, 1000],
    latent: ["Latent R, or 0", 0, MANY], rotary: ["Rotary P", 0, MANY], period: ["Period", 1, 1000],
    count: ["Experts E, or 0", 0, MANY], active: ["Experts of a token", 1, MANY],
    shared: ["Shared expert, or 0", 0, MANY],
  };
  const SHARES = {capacity: ["Capacity factor", 1e-6, 1e6], dropout: ["Dropout", 0, 1]};
  const OPTIONS = { // {field: [words, {value: words}]}
    of: ["Model", Object.fromEntries(Object.keys(MODELS).map(name => [name, name]))],
    on: ["Devices", Object.fromEntries(["H100", "H200", "B200", "A100", "TPU v5e", "TPU v5p",
                                        "TPU v6e", "TPU v4"].map(name => [name, name]))],
    slice: ["Slice", {}], rules: ["Sharding", words.RULES], schedule: ["Schedule", words.SCHEDULES],
    remat: ["A layer keeps", words.KEPT], method: ["Context", words.METHODS],
    attention: ["Attention", words.ATTENTION], gated: ["MLP", {true: "SwiGLU", false: "GELU"}],
    bias: ["Biases", {false: "none", true: "everywhere"}],
    dtype: ["Activations in", {bfloat16: "bfloat16", float16: "float16", float32: "float32"}],
  };
  const EXPERTS = ["count", "active", "shared", "capacity"];
  const COMMON = ["embed", "hidden", "heads", "layers", "dtype", "dropout"];
  const SIZES = {
    ViT: ["image", "patch", "classes", ...COMMON], MiniGPT: ["vocabulary", "tokens", ...COMMON],
    Decoder: ["vocabulary", "tokens", "embed", "hidden", "heads", "groups", "layers", "dtype",
              "gated", "bias", "latent", "rotary", "period", "dropout", ...EXPERTS],
  };
  const START = {of: Object.keys(MODELS)[0], on: "H100", gpus: 8, slices: 1, rows: 32, batch: 8,
                 expert: 1, stage: 1, context: 1, model: 1, rules: "fully_sharded_again",
                 schedule: "gpipe", microbatches: 1, remat: "all", method: "ring",
                 attention: "skipped"};

  // Fields

  const only = (options, holds) => Object.fromEntries(
    Object.entries(options).filter(([name]) => holds(name)));
  const select = (name, options) => element("select", {name}, ...Object.entries(options).map(
    ([value, words]) => element("option", {value}, words)));
  const number = (name, [, min, max]) => element("input", {
    name, type: "number", min, max, step: name in SHARES ? "any" : 1,
    inputMode: name in SHARES ? "decimal" : "numeric"});
  const field = name => {
    const [label] = NUMBERS[name] ?? SHARES[name] ?? OPTIONS[name];
    return element("label", {className: "calculator-field"}, element("span", {}, label),
                   OPTIONS[name] ? select(name, OPTIONS[name][1])
                     : number(name, NUMBERS[name] ?? SHARES[name]));
  };
  const group = (legend, names, ...more) => element("fieldset", {}, element("legend", {}, legend),
                                                    ...names.map(field), ...more);
  const note = () => element("p", {className: "calculator-said"});
  const [ofModel, ofMachine] = [note(), note()];
  const sizes = element("details", {}, element("summary", {}, "Sizes of the model"));
  const form = element(
    "form", {className: "calculator-form"},
    group("Model and machine", ["of"], ofModel, ...["on", "gpus", "slice", "slices"].map(field),
          ofMachine, field("rows")),
    group("Mesh", AXES),
    group("Plan", ["rules", "schedule", "microbatches", "remat", "method", "attention"]), sizes);
  const status = element("div", {"aria-live": "polite"}), details = element("div");
  const output = element("div", {className: "calculator-output"}, status, details);
  const ranking = element("div", {className: "calculator-ranking"});
  home.replaceChildren(form, output, ranking);
  const [shown, showRanking] = [meshbookShown(costs), meshbookRanking(costs, ranking)];
  const input = name => form.elements[name], valueOf = name => input(name).value;

  // A value, where the field can have it.
  const set = (name, value) => {
    const here = input(name);
    if (!here) return;
    const options = [...here.options ?? []].map(each => each.value);
    if (here.tagName !== "SELECT" || options.includes(`${value}`)) here.value = value;
  };
  const offer = (name, options) => {
    const before = valueOf(name);
    input(name).replaceChildren(...select(name, options).children);
    set(name, before);
  };
  const show = (name, isShown) => {
    input(name).disabled = input(name).parentNode.hidden = !isShown;
  };
  const isTPU = () => valueOf("on") in SLICES;
  const [kindOf, given] = [() => MODELS[valueOf("of")][0], () => MODELS[valueOf("of")][1]];
  // What attention a program would have: a kernel on GPUs, and on TPUs for long rows.
  const usual = () => isTPU() && !(given().tokens >= 1024) ? "scores"
    : kindOf() === "ViT" ? "fused" : "skipped";

  // The fields that a model has, and its sizes.
  const resize = () => {
    const names = SIZES[kindOf()], experts = given().experts ?? {...meshbookData.experts, count: 0};
    sizes.replaceChildren(sizes.firstChild, ...names.map(field));
    const own = {...given(), ...experts, capacity: experts.capacity || 1.25};
    for (const name of names) set(name, own[name]);
    offer("rules", kindOf() === "Decoder" ? words.RULES : only(words.RULES, (
      name => ["data_parallel", ...meshbookData.ranking.compiled].includes(name))));
    const {scores, rows, blocks, fused, skipped} = words.ATTENTION;
    offer("attention", kindOf() === "ViT" ? {fused, scores, rows, blocks}
      : {skipped, fused, scores, rows, blocks});
    const policies = meshbookData.tables[kindOf()].kept;
    offer("remat", only(words.KEPT, name => name in policies));
  };
  const offerSlices = () => {
    show("gpus", !isTPU());
    show("slice", isTPU());
    show("slices", isTPU() && meshbookData.devices[valueOf("on")].network > 0);
    offer("slice", Object.fromEntries((SLICES[valueOf("on")] ?? []).map(
      shape => [shape.join("x"), `${shape.join(" × ")}: ${product(shape)}`])));
  };
  // The axes that a model cannot have have one device, as do those that are not shown.
  const axesOf = () => {
    const isDecoder = kindOf() === "Decoder", number = name => Number(input(name)?.value ?? 0);
    const hasExperts = number("count") > 0;
    return {batch: true, model: true, expert: hasExperts, stage: isDecoder,
            context: isDecoder && !hasExperts && !number("latent")};
  };
  const settle = () => {
    const axes = axesOf();
    for (const axis of AXES) {
      if (!axes[axis] && valueOf(axis) > 1) {
        set("batch", valueOf("batch") * valueOf(axis));
        set(axis, 1);
      }
      show(axis, axes[axis]);
    }
    show("schedule", valueOf("stage") > 1);
    show("method", valueOf("context") > 1);
  };
  // The batch axis takes the devices that the others leave.
  const refit = () => {
    const {size} = readMachine(), others = product(AXES.slice(1).map(valueOf));
    if (size % others === 0) set("batch", size / others);
  };

  // What is read

  const read = name => {
    const text = valueOf(name).trim(), value = text === "" ? NaN : Number(text);
    const [label, least, most] = NUMBERS[name] ?? SHARES[name];
    const isWhole = name in NUMBERS;
    if (!(value >= least && value <= most) || isWhole && !Number.isInteger(value))
      refuse(`${label.replace(", or 0", "")} is a ${isWhole ? "whole number" : "number"} from `
        + `${least.toLocaleString("en-US")} to ${most.toLocaleString("en-US")}; found `
        + (text || "nothing"));
    return value;
  };
  const readMachine = () => {
    const name = valueOf("on");
    if (!isTPU()) return costs.machineOf(name, [read("gpus")]);
    const slices = input("slices").disabled ? 1 : read("slices");
    const machine = costs.machineOf(name, valueOf("slice").split("x").map(Number), slices);
    if (machine.size > DEVICES)
      refuse(`expected at most ${DEVICES.toLocaleString("en-US")} devices; found ${machine.size}`);
    return machine;
  };
  const readConfig = () => {
    const isTrue = {true: true, false: false};
    const own = Object.fromEntries(SIZES[kindOf()].map(name => [
      name, name in OPTIONS ? isTrue[valueOf(name)] ?? valueOf(name) : read(name)]));
    const {count, active, shared, capacity, ...others} = own;
    const experts = count ? {...given().experts, count, active, shared, capacity} : null;
    return costs.configOf(kindOf(), kindOf() === "Decoder" ? {...others, experts} : others);
  };
  const readPlan = ({config, machine, rows, attention}) => {
    const mesh = Object.fromEntries(AXES.map(
      axis => [axis, input(axis).disabled ? 1 : read(axis)]));
    const sizes = AXES.filter(axis => !input(axis).disabled).map(axis => mesh[axis]);
    if (product(sizes) !== machine.size)
      refuse(`expected a mesh of all ${machine.size} devices; found ${sizes.join(" · ")} = `
        + product(sizes));
    const plan = costs.planOf({...mesh, attention, rules: valueOf("rules"), remat: valueOf("remat"),
                               schedule: valueOf("schedule"), method: valueOf("method"),
                               microbatches: read("microbatches")});
    const why = costs.impossible(config, plan, rows);
    if (why) refuse(why);
    costs.groupsOf(machine, costs.sizesOn(plan)); // which refuses what slices cannot divide
    return plan;
  };
  const described = ({config, machine}) => {
    const {stored} = costs.describe(config, costs.planOf({}), 1).numbers;
    ofModel.textContent = `${countOf(stored)} parameters`;
    ofMachine.textContent = words.described(machine, costs.ringsOf(machine));
  };

  // A sentence in the place of what cannot be.
  const tried = make => {
    try { return make(); } catch (error) {
      if (!(error instanceof RangeError)) throw error;
      status.replaceChildren(element("p", {className: "calculator-verdict calculator-no"},
                                     error.message));
      details.replaceChildren();
      return null;
    }
  };
  const update = () => {
    const asked = tried(() => ({machine: readMachine(), config: readConfig(), rows: read("rows"),
                                attention: valueOf("attention")}));
    if (asked) described(asked);
    const plan = asked && tried(() => readPlan(asked));
    if (plan) tried(() => {
      const found = shown({...asked, plan});
      status.replaceChildren(...found.verdict);
      details.replaceChildren(...found.details);
    });
    showRanking(asked && {...asked, plan});
    history.replaceState(null, "", `#${new URLSearchParams(new FormData(form))}`);
  };

  // The fields as they are at first, or as an address has them; an older one begins anew.
  const address = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  const chosen = address.of in MODELS ? {...START, ...address} : START;
  for (const name of ["of", "on"]) set(name, START[name]);
  for (const name of ["of", "on"]) set(name, chosen[name]);
  resize();
  offerSlices();
  for (const each of [START, chosen])
    for (const [name, value] of Object.entries(each)) set(name, value);
  settle();
  form.addEventListener("input", ({target: {name}}) => {
    if (name === "of") resize();
    if (name === "on") offerSlices();
    if (name === "of" || name === "on") set("attention", usual());
    settle();
    if (["on", "gpus", "slice", "slices"].includes(name)) tried(refit);
    update();
  });
  form.addEventListener("submit", event => event.preventDefault());
  update();
};

{
  const home = document.getElementById("calculator");
  if (home) meshbookCalculator(home);
}
