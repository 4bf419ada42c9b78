// What the calculator calls the parts of a plan and of a machine, in the words of the field.
"use strict";

const meshbookWords = (() => {
  const {digits, memoryOf} = meshbookForm, GIGA = 1e9, TERA = 1e12;
  const RULES = {
    fully_sharded: "FSDP by the compiler", fully_sharded_kept: "ZeRO-3 / FSDP",
    fully_sharded_again: "FSDP with regather", zero2: "ZeRO-2", zero1: "ZeRO-1",
    data_parallel: "data parallel (DDP)", tensor_parallel: "tensor parallel",
    sequence_parallel: "tensor + sequence parallel",
  };
  const SCHEDULES = {gpipe: "GPipe", lockstep: "1F1B, lockstep", one_f_one_b: "1F1B, slots",
                     zero_bubble: "ZB-H1, slots"};
  const KEPT = {none: "everything", products: "matmul outputs", attention: "attention outputs",
                all: "its input"};
  const METHODS = {ring: "ring", gather: "gathered keys", ulysses: "Ulysses"};
  const ATTENTION = {skipped: "fused, skips masked", fused: "fused kernel", scores: "scores kept",
                     rows: "row by row", blocks: "block by block"};

  // The rules by their name on this mesh: none where all weights are whole, and nobody shares rows.
  const rulesOf = ({rules, batch, expert, stage, context, model}) => {
    if (rules === "fully_sharded" && stage > 1) return [RULES.fully_sharded_kept];
    if (rules !== "tensor_parallel" || model > 1) return [RULES[rules]];
    return batch * expert * context > 1 ? [RULES.data_parallel] : [];
  };
  const how = plan => [
    ...rulesOf(plan), ...(plan.stage > 1 ? [SCHEDULES[plan.schedule]] : []),
    ...(plan.context > 1 ? [METHODS[plan.method]] : []),
    ...(plan.microbatches > 1 ? [`${plan.microbatches} microbatches`] : []),
    `keeps ${KEPT[plan.remat]}`].join("; ");

  const times = sizes => sizes.join(" × ");
  const named = ({device, shape, slices, size}) => device.switch ? `${size} ${device.name}`
    : `${slices > 1 ? `${slices} × (${times(shape)})` : times(shape)} ${device.name}`;
  const rate = bytes => `${digits(bytes / GIGA)} GB/s`;
  const ofSwitch = ({device: {node, links, link, network, adds}, size}) => [
    `${size > node ? `${size / node} nodes of ${node}` : "One node"}: NVLink, `
      + `${rate(links * link)} out of each GPU`
      + (adds ? ", through a switch that adds up all-reduces" : ""),
    ...(size > node ? [`InfiniBand between nodes, ${rate(network)} out of each GPU`] : [])];
  const ofTorus = ({device: {link, network}, shape, slices}, rings) => {
    const linked = shape.filter((size, at) => rings[at] && size > 1);
    return [
      `${slices > 1 ? `${slices} slices, each a` : "A"} grid of ${times(shape)} chips, `
        + (linked.length ? `a ring along ${times(linked)}` : "without links around")
        + `, ${rate(link)} over a link in each direction`,
      ...(slices > 1 ? [`between slices DCN, ${rate(network)} out of each chip`] : [])];
  };
  // What a machine is, in a sentence: each device, and what is between them.
  const described = (machine, rings) => {
    const {memory, bandwidth, flops} = machine.device;
    const each = `each ${memoryOf(memory)} at ${rate(bandwidth)}, `
      + `${digits(flops / TERA)} TFLOP/s in bfloat16`;
    return `${[...(machine.device.switch ? ofSwitch(machine) : ofTorus(machine, rings)),
               each].join("; ")}.`;
  };
  return {RULES, SCHEDULES, KEPT, METHODS, ATTENTION, how, named, described};
})();
