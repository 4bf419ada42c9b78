// The calculator's picture of the memory of a step, moment by moment.
"use strict";

const meshbookTimeline = (() => {
  const PARTS = meshbookParts; // {kind of memory: [words, colour]}, from the bottom upwards
  const {memoryOf, drawn} = meshbookForm;
  const whole = ({held}) => Object.values(held).reduce((all, each) => all + each, 0);
  const ticks = length => {
    const unit = 10 ** Math.floor(Math.log10(length / 2));
    const step = [1, 2, 5, 10].map(by => by * unit).find(step => length / step < 6);
    return Array.from({length: Math.floor(length / step) + 1}, (_, at) => step * at);
  };

  // The memory of a device over a step, kinds on each other, and the device's own as a line.
  // Returns the drawing, and what moves the line that marks a moment.
  const LEFT = 62, WIDE = 338, HIGH = 150, TOP = 22;
  const timeline = (moments, limit, words) => {
    const most = Math.max(limit, ...moments.map(whole)), wide = WIDE / moments.length;
    const level = size => TOP + HIGH * (1 - size / most);
    const art = drawn("svg", {viewBox: `0 0 ${LEFT + WIDE + 4} ${TOP + HIGH + 22}`, role: "img",
                              "aria-label": words, fill: "currentColor"});
    const line = (x1, y1, x2, y2, more = {}) => drawn("line", {x1, y1, x2, y2,
                                                               stroke: "currentColor", ...more});
    const text = (x, y, words, anchor) => drawn("text", {
      x, y, "text-anchor": anchor, "font-size": 11}, words);
    let floor = moments.map(() => 0);
    for (const [kind, [, fill]] of Object.entries(PARTS)) {
      const roof = moments.map(({held}, at) => floor[at] + held[kind]);
      const there = roof.map(size => `V${level(size)}h${wide}`).join("");
      const back = [...floor].reverse().map(size => `V${level(size)}h${-wide}`).join("");
      art.append(drawn("path", {d: `M${LEFT} ${level(floor[0])}${there}${back}z`, fill,
                                "data-kind": kind}));
      floor = roof;
    }
    const unit = 1024 ** Math.min(10, Math.floor(Math.log(most) / Math.log(1024)));
    for (const value of ticks(most / unit).map(each => each * unit))
      art.append(line(LEFT - 4, level(value), LEFT, level(value)),
                 text(LEFT - 6, level(value) + 4, memoryOf(value), "end"));
    const base = TOP + HIGH, turn = LEFT + wide * moments.findIndex(
      ({phase}) => phase === "backward");
    const mark = line(0, TOP - 14, 0, base, {"stroke-width": 1.5, class: "calculator-mark"});
    art.append(
      line(LEFT, base, LEFT + WIDE, base),
      line(LEFT, level(limit), LEFT + WIDE, level(limit),
           {"stroke-width": 1.4, "stroke-dasharray": "6 4", class: "calculator-limit"}),
      line(turn, base, turn, base + 15), mark,
      text(turn - 5, base + 14, "← forward pass, loss", "end"),
      text(turn + 5, base + 14, "backward pass, update →", "start"));
    return [art, at => {
      for (const end of ["x1", "x2"]) mark.setAttribute(end, LEFT + wide * (at + 0.5));
    }];
  };

  return {timeline, whole};
})();
