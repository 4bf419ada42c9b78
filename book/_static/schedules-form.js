// Sliders for pipeline schedules. The page has a picture of Python's (meshbook.drawing.schedules),
// which brings the colours; this adds sliders above it, and draws what they ask for in its place.
"use strict";

(() => {
  const {SCHEDULES, eventsOf, facts} = meshbookSchedules;
  const {element, drawn} = meshbookForm;
  const SLIDERS = { // [words, least, most, step, at first]
    p: ["Devices p", 1, 8, 1, 4], m: ["Microbatches m", 1, 32, 1, 8],
    v: ["Chunks v", 2, 4, 1, 2], F: ["Cost of F", 0.25, 3, 0.25, 1],
    B: ["Cost of B", 0.25, 3, 0.25, 1], W: ["Cost of W", 0.25, 3, 0.25, 1],
  };
  // As in meshbook.drawing.schedules.
  const LEFT = 26, WIDE = 366, RIGHT = 32, HIGH = 16, PITCH = 20, LEAST = 5.5;
  const brief = value => String(Number(value.toPrecision(6)));

  const build = figure => {
    const {colours, devices, words} = JSON.parse(figure.dataset.style);
    const shade = (kind, chunk) => colours[kind][Math.min(chunk, colours[kind].length - 1)];
    const rect = (x, y, width, height, more) => drawn("rect", {x, y, width, height, ...more});
    const text = (x, y, told, size, anchor = "middle", more = {}) => drawn("text", {
      x, y, "font-size": size, "text-anchor": anchor, fill: "currentColor", ...more}, told);
    const filled = (kind, chunk, x, y, wide, high) => {
      const width = wide - Math.min(0.8, 0.15 * wide);
      const body = [rect(x, y, width, high, {fill: shade(kind, chunk)[0]})];
      if (kind === "BW") body.push(rect(x, y + 0.75 * high, width, 0.25 * high,
                                        {fill: shade("W", chunk)[0]}));
      return body;
    };
    const lane = (device, y, wide, most) => {
      const [fill, ink] = devices[device % devices.length], middle = y + HIGH / 2 + 4;
      return [drawn("circle", {cx: 9, cy: y + HIGH / 2, r: 8, fill}),
              text(9, middle, String(device), 11, "middle", {fill: ink}),
              rect(LEFT, y, wide, HIGH, {fill: "none", stroke: "currentColor",
                                         "stroke-opacity": 0.3}),
              text(LEFT + WIDE + RIGHT / 2, middle, brief(most), 11)];
    };
    const boxes = (events, top, scale) => {
      const size = Math.min(9, ...events.map(({task, start, end}) =>
        1.45 * scale * (end - start) / String(task.microbatch).length));
      return events.map(({device, task: {kind, microbatch, chunk}, start, end}) => {
        const [x, y, wide] = [LEFT + scale * start, top + PITCH * device, scale * (end - start)];
        const box = drawn("g", {
          "data-device": device, "data-task": `${kind} ${microbatch} ${chunk}`,
          "data-start": brief(start), "data-end": brief(end)},
          drawn("title", {}, `device ${device}: ${kind} of microbatch ${microbatch}, `
            + `chunk ${chunk}, from ${brief(start)} to ${brief(end)}`),
          ...filled(kind, chunk, x, y, wide, HIGH));
        if (size >= LEAST) box.append(text(x + wide / 2, y + 11, String(microbatch), size, "middle",
                                           {fill: shade(kind, chunk)[1]}));
        return box;
      });
    };
    const key = kinds => {
      const body = [];
      let [x, y] = [0, 2];
      for (const kind of kinds) {
        const wide = 26 + 6 * words[kind].length;
        if (x && x + wide > LEFT + WIDE + RIGHT) [x, y] = [0, y + 17];
        body.push(...filled(kind, 0, x, y, 11, 11), text(x + 15, y + 9.5, words[kind], 11, "start"));
        x += wide;
      }
      return [body, y + 20];
    };
    const axis = (y, whole) => {
      const unit = 10 ** Math.floor(Math.log10(whole / 2));
      const step = [1, 2, 5, 10].map(by => by * unit).find(each => whole / each < 6);
      const line = (x1, y1, x2, y2) => drawn("line", {x1, y1, x2, y2, stroke: "currentColor"});
      return [line(LEFT, y, LEFT + WIDE, y), ...Array.from(
        {length: Math.floor(whole / step) + 1}, (_, at) => {
          const x = LEFT + WIDE * step * at / whole;
          return [line(x, y, x, y + 4), text(x, y + 15, brief(step * at), 10)];
        }).flat()];
    };
    // The picture of {name: events}, and what is told to those who do not see it.
    const picture = found => {
      const known = Object.entries(found).map(([name, events]) => [name, events, facts(events)]);
      const whole = Math.max(...known.map(([, , {makespan}]) => makespan)), told = [];
      const kinds = new Set(Object.values(found).flat().map(({task}) => task.kind));
      let [body, y] = key(Object.keys(words).filter(kind => kinds.has(kind)));
      for (const [name, events, {makespan, bubble, live}] of known) {
        const sum = `makespan ${brief(makespan)}, bubble ${(100 * bubble).toFixed(1)}%`;
        body.push(text(0, y + 11, name, 12, "start", {"font-weight": 600}),
                  text(LEFT + WIDE, y + 11, sum, 11, "end"),
                  text(LEFT + WIDE + RIGHT / 2, y + 11, "live", 11));
        live.forEach((most, device) => body.push(
          ...lane(device, y + 17 + PITCH * device, WIDE * makespan / whole, most)));
        body.push(...boxes(events, y + 17, WIDE / whole));
        y += 24 + PITCH * live.length;
        told.push(`${name}: ${sum}, live ${live.map(brief).join(", ")}`);
      }
      return [drawn("svg", {
        viewBox: `0 0 ${LEFT + WIDE + RIGHT} ${y + 18}`, role: "img", fill: "currentColor",
        style: "display:block;width:100%;height:auto",
        "aria-label": "Pipeline schedules, a row per device, time to the right. " + told.join(". "),
      }, ...body, ...axis(y, whole)), told.join(". ")];
    };

    const sliders = Object.entries(SLIDERS).map(([name, [label, min, max, step, value]]) => {
      const shown = element("output", {}), input = element("input", {
        name, type: "range", min, max, step, value, "aria-label": label});
      return element("label", {className: "schedules-field"}, element("span", {}, label), input, shown);
    });
    const choices = Object.keys(SCHEDULES).map(name => element("label", {}, element(
      "input", {type: "checkbox", name: "schedule", value: name, checked: true}), ` ${name}`));
    const form = element("form", {className: "schedules-form", "aria-label": "Pipeline schedules"},
      element("div", {}, ...sliders.slice(0, 3)), element("div", {}, ...sliders.slice(3)),
      element("div", {className: "schedules-choices", role: "group",
                       "aria-label": "Schedules that are drawn"}, ...choices));
    const told = element("p", {className: "schedules-told", "aria-live": "polite"});
    const refused = element("p", {className: "schedules-refused"});
    const place = element("div", {className: "schedules-picture"}, ...figure.childNodes);
    figure.append(form, place, refused, told);

    const update = () => {
      const values = Object.fromEntries(Object.keys(SLIDERS).map(
        name => [name, Number(form.elements[name].value)]));
      for (const field of sliders)
        field.querySelector("output").textContent = field.querySelector("input").value;
      const {p, m, v, ...costs} = values, found = {}, wrong = [];
      for (const name of new FormData(form).getAll("schedule"))
        try {
          found[name] = eventsOf(name, {p, m, v, costs});
        } catch (error) {
          if (!(error instanceof RangeError)) throw error;
          wrong.push(`${name}: ${error.message}.`);
        }
      const [art, words] = Object.keys(found).length ? picture(found) : ["", ""];
      place.replaceChildren(art);
      refused.textContent = wrong.join(" ");
      told.textContent = words;
    };
    form.addEventListener("input", update);
    form.addEventListener("submit", event => event.preventDefault());
    update();
  };

  document.querySelectorAll("figure.schedules").forEach(build);
})();
