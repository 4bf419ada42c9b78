// Pipeline schedules: meshbook.parallel.schedules in JavaScript, and what meshbook.drawing.schedules
// finds in their events. tests/book/test_schedules_page.py holds both to the Python's.
"use strict";

const meshbookSchedules = (() => {
  const range = length => Array.from({length}, (_, at) => at);
  const every = (kind, microbatches) => range(microbatches).map(
    microbatch => ({kind, microbatch, chunk: 0}));

  // `ahead` forward tasks, then one forward and one backward in turn, then what is left.
  const alternate = (forward, backward, ahead) => {
    ahead = Math.min(ahead, forward.length);
    const pairs = forward.slice(ahead).flatMap((task, at) => [task, backward[at]]);
    return [...forward.slice(0, ahead), ...pairs, ...backward.slice(forward.length - ahead)];
  };
  // Each BW as a B and a W, with the W after as many other Bs.
  const late = (tasks, behind) => {
    const out = [], waiting = [];
    for (const task of tasks) {
      if (task.kind !== "BW") { out.push(task); continue; }
      out.push({...task, kind: "B"});
      waiting.push({...task, kind: "W"});
      if (waiting.length > behind) out.push(waiting.shift());
    }
    return [...out, ...waiting];
  };

  const gpipe = (p, m) => range(p).map(() => [...every("F", m), ...every("BW", m)]);
  const oneFOneB = (p, m) => range(p).map(
    device => alternate(every("F", m), every("BW", m), p - 1 - device));
  const splitBackward = schedule => schedule.map(tasks => late(tasks, 0));
  const zeroBubble = (p, m) => oneFOneB(p, m).map(late);
  const interleaved = (p, m, v) => {
    if (m % p) throw new RangeError(
      `an interleaved schedule needs microbatches in rounds of ${p}, one for each device; found ${m}`);
    const forward = range(m / p).flatMap(round => range(v).flatMap(chunk => range(p).map(
      at => ({kind: "F", microbatch: round * p + at, chunk}))));
    const backward = forward.map(
      ({microbatch, chunk}) => ({kind: "BW", microbatch, chunk: v - 1 - chunk}));
    return range(p).map(
      device => alternate(forward, backward, (v - 1) * p + 2 * (p - 1 - device)));
  };

  // What must be done before a task: of each part (F, B) of a microbatch, on which stage.
  const needs = ({kind, microbatch}, stage, last) => {
    const own = part => `${part} ${microbatch} `;
    if (kind === "W") return [own("B") + stage];
    if (kind === "F") return stage ? [own("F") + (stage - 1)] : [];
    return [own("F") + stage, ...(stage < last ? [own("B") + (stage + 1)] : [])];
  };

  // [{device, task, start, end}]: each device starts its next task as soon as what it needs is
  // there. costs: {F, B, W} of one task; BW takes both.
  const simulate = (schedule, costs) => {
    const p = schedule.length, last = p * (1 + Math.max(...schedule[0].map(({chunk}) => chunk))) - 1;
    const next = schedule.map(() => 0), free = schedule.map(() => 0), done = new Map(), events = [];
    while (next.some((at, device) => at < schedule[device].length)) {
      const able = range(p).filter(device => next[device] < schedule[device].length
        && needs(schedule[device][next[device]], schedule[device][next[device]].chunk * p + device,
                 last).every(need => done.has(need)));
      if (!able.length) throw new RangeError("the schedule deadlocks");
      for (const device of able) {
        const task = schedule[device][next[device]++], stage = task.chunk * p + device;
        const start = Math.max(free[device], ...needs(task, stage, last).map(need => done.get(need)));
        free[device] = start + [...task.kind].reduce((all, part) => all + costs[part], 0);
        for (const part of task.kind) done.set(`${part} ${task.microbatch} ${stage}`, free[device]);
        events.push({device, task, start, end: free[device]});
      }
    }
    return events;
  };

  // {makespan, bubble, live: the most microbatches that wait on each device}; see `facts` in Python.
  const facts = events => {
    const makespan = Math.max(...events.map(({end}) => end));
    const chunks = 1 + Math.max(...events.map(({task}) => task.chunk));
    const devices = 1 + Math.max(...events.map(({device}) => device));
    const busy = events.reduce((all, {start, end}) => all + end - start, 0);
    const waiting = range(devices).fill(0), live = range(devices).fill(0);
    for (const {device, task: {kind}} of events) { // of a device, in order
      waiting[device] += kind === "F" ? 1 : kind === "B" ? 0 : -1;
      live[device] = Math.max(live[device], waiting[device]);
    }
    return {makespan, bubble: 1 - busy / (devices * makespan),
            live: live.map(count => count / chunks)};
  };

  // {name: [schedule of (p, m, v), whether its tasks are of a chunk]}
  const SCHEDULES = {
    "GPipe": gpipe,
    "1F1B": oneFOneB,
    "1F1B, B before W": (p, m) => splitBackward(oneFOneB(p, m)),
    "Interleaved 1F1B": interleaved,
    "ZB-H1": zeroBubble,
  };
  // choice: {p, m, v, costs of all layers of a device}; events of the schedule with this name.
  const eventsOf = (name, {p, m, v, costs: {F, B, W}}) => {
    const parts = name === "Interleaved 1F1B" ? v : 1;
    return simulate(SCHEDULES[name](p, m, v), {F: F / parts, B: B / parts, W: W / parts});
  };

  return {SCHEDULES, eventsOf, facts, simulate};
})();
