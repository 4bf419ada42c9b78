// All meshes of so many devices: meshbook.planning.estimates.ranked_meshes in JavaScript.
// tests/book/test_calculator_ranking.py holds its order and its numbers to the Python's.
"use strict";

meshbook.ranking = (() => {
  const FEW = ["data_parallel", "tensor_parallel", "fully_sharded"];
  const PRESETS = {ViT: FEW, MiniGPT: FEW, Decoder: [
    "data_parallel", "tensor_parallel", "sequence_parallel", "zero1", "zero2", "fully_sharded",
    "fully_sharded_kept", "fully_sharded_again"]};
  const before = (one, other) => one.fits !== other.fits ? one.fits : one.seconds < other.seconds;

  // Of a mesh [{rows, across, preset, found, fits, seconds}] for every preset that can be.
  const byPreset = (choice, rows, across, reasons) => (PRESETS[choice.model] ?? PRESETS.Decoder)
    .flatMap(preset => {
      try {
        const found = meshbook.estimate({...choice, rows, across, preset});
        return [{rows, across, preset, found, fits: found.peak <= choice.device.memory,
                 seconds: meshbook.sum(Object.values(found.floors))}];
      } catch (error) {
        if (!(error instanceof RangeError)) throw error;
        reasons.push(error.message);
        return [];
      }
    });

  // choice: as of meshbook.estimate, without a mesh and a preset. Returns {found: the best preset
  // of each mesh, those that fit and the fastest first; refused: [[rows, across], why]}.
  const meshes = (choice, devices) => {
    const found = [], refused = [];
    for (let across = 1; across <= devices; across += 1) {
      if (devices % across) continue;
      const reasons = [], each = byPreset(choice, devices / across, across, reasons);
      if (each.length) found.push(each.reduce((best, one) => before(one, best) ? one : best));
      else refused.push([[devices / across, across], reasons[0]]);
    }
    found.sort((one, other) => before(one, other) ? -1 : before(other, one) ? 1 : 0);
    return {found, refused};
  };

  return {meshes};
})();
