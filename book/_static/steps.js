// A collective stepped through by the reader. The page has a small picture for each step
// (meshbook.drawing.collective_steps); this shows one at a time, with buttons and a slider.
// Without it, or on paper, all are seen. tests/book/test_steps.py holds what is shown to Python.
"use strict";

(() => {
  const PAUSE = 1400; // milliseconds between steps while playing

  const element = (tag, properties, ...children) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(properties))
      name in made ? made[name] = value : made.setAttribute(name, value);
    made.append(...children);
    return made;
  };

  const build = figure => {
    const steps = [...figure.querySelectorAll(".collective-step")], last = steps.length - 1;
    let at = 0, all = false, timer = null;
    const button = (words, act) => element("button", {type: "button", onclick: act}, words);
    const back = button("Previous", () => { stop(); show(at - 1); });
    const play = button("Play", () => timer === null ? start() : stop());
    const next = button("Next", () => { stop(); show(at + 1); });
    const every = button("All steps", () => { stop(); all = !all; show(at); });
    const slider = element("input", {type: "range", min: 0, max: last, step: 1, value: 0,
      "aria-label": `Step of the ${figure.dataset.kind}`,
      oninput: () => { stop(); show(Number(slider.value)); }});
    const told = element("p", {className: "collective-told", "aria-live": "polite"});
    const bar = element("div", {className: "collective-controls", role: "group",
      "aria-label": `Steps of the ${figure.dataset.kind}`}, back, play, next, slider, every);

    const show = to => {
      at = Math.max(0, Math.min(last, to));
      steps.forEach((step, place) => { step.hidden = !all && place !== at; });
      figure.classList.toggle("collective-one", !all);
      slider.value = at;
      const words = steps[at].querySelector("svg").getAttribute("aria-label").split(". ")[0];
      slider.setAttribute("aria-valuetext", words);
      told.textContent = all ? `All ${last + 1} pictures are shown` : words;
      [back.disabled, next.disabled] = [all || at === 0, all || at === last];
      play.disabled = slider.disabled = all;
      every.setAttribute("aria-pressed", all);
    };
    const stop = () => {
      clearInterval(timer);
      timer = null;
      play.textContent = "Play";
    };
    const start = () => {
      show(at === last ? 0 : at + 1);
      play.textContent = "Pause";
      timer = setInterval(() => {
        show(at + 1);
        if (at === last) stop();
      }, PAUSE);
    };

    figure.querySelector(".collective-steps").before(bar, told);
    show(0);
  };

  document.querySelectorAll("figure.collective").forEach(build);
})();
