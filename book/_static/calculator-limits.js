// What the calculator's formulas do not know, in sentences of the form; see calculator-form.js.
"use strict";

const meshbookLimits = (() => {
  const isTPU = ({name}) => name.startsWith("TPU");
  const NODE = 8; // GPUs that NVLink joins
  // Devices of the largest slice: https://cloud.google.com/tpu/docs, the pages of the versions.
  const SLICE = {"TPU v2": 512, "TPU v3": 2048, "TPU v4": 4096, "TPU v5e": 256, "TPU v5p": 8960,
                 "TPU v6e": 256, "TPU7x": 18432};

  // Of the memory: whose tiles, and which attention.
  const ofMemory = ({device, sizes, axis}) => [
    ...(isTPU(device) ? [] : [`Arrays are counted in the tiles of a TPU, on ${device.name}, too.`]),
    ...(sizes.byRow || axis === "context" ? [] : ["Attention writes its T × T scores here. No fused "
      + "attention is counted: a program with a kernel that keeps no scores needs less memory."]),
  ];
  // Of the links.
  const ofLinks = ({device, rows, across}) => {
    const [count, most] = [rows * across, SLICE[device.name] ?? Infinity];
    if (!isTPU(device) && count > NODE)
      return [`NVLink joins ${NODE} GPUs of a node, and here it is counted between all ${count}. The `
        + "slower network between nodes is not known to this form."];
    return count > most ? [`A slice of ${device.name} has at most ${most} devices. The slower network `
      + "between slices is not known to this form."] : [];
  };
  // Of the floors: which program they are a floor of.
  const ofWork = ({sizes}) => sizes.vocabulary ? ["Attention is counted for all pairs of tokens. "
    + "A program that skips those that the causal mask hides can take less than the floor of "
    + "compute."] : [];

  // What the ranking of a slice is not.
  const ofRanking = ({slice, rows, across}) => {
    if (!slice) return [];
    const chips = slice.split("x").reduce((all, each) => all * each, 1);
    return chips === rows * across ? [] : [`The ranking below is of the ${chips} chips of “Chips to `
      + `rank”, not of the ${rows * across} devices of this mesh.`];
  };
  const ORDER = "Each with the sharding whose sum is least; “no” does not fit. The sums are lower "
    + "bounds, each of another program. Their order need not be the order of the times.";

  return {ofMemory, ofLinks, ofWork, ofRanking, ORDER};
})();
