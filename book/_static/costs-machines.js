// Devices as they are joined: meshbook.costs.places and meshbook.costs.machines in JavaScript.
"use strict";

meshbook.costs.parts.push(data => {
  const {product, sum} = meshbook;
  const {floor, upTo, refuse} = meshbook.costs.helpers;

  // places.py: where a mesh's axes lie on a torus of chips, as JAX lays them

  const columns = (parts, dimension) => parts.map(own => own[dimension]);

  // All ways to take so many of some indices, in order.
  const combinations = (indices, count) => count === 0 ? [[]] : indices.flatMap((first, at) =>
    combinations(indices.slice(at + 1), count - 1).map(rest => [first, ...rest]));
  // All ways to write a size as a product of divisors of what is left of each dimension.
  const factored = (size, left) => left.length === 0 ? (size === 1 ? [[]] : [])
    : Array.from({length: left[0]}, (_, at) => at + 1)
      .filter(each => left[0] % each === 0 && size % each === 0)
      .flatMap(each => factored(size / each, left.slice(1)).map(rest => [each, ...rest]));

  // Whole dimensions for each axis, the last axis first, and as many as can be; null where an axis
  // needs a part of one.
  const whole = (torus, sizes) => {
    const left = [...torus], parts = sizes.map(() => torus.map(() => 1));
    for (let axis = sizes.length - 1; axis >= 0; axis -= 1) {
      const chosen = torus.map((_, at) => torus.length - at)
        .flatMap(count => combinations([...torus.keys()], count))
        .find(taken => product(taken.map(at => left[at])) === sizes[axis]);
      if (!chosen && sizes[axis] > 1) return null;
      for (const at of chosen ?? []) [parts[axis][at], left[at]] = [torus[at], 0];
    }
    return parts;
  };
  // Which of two splits of an axis is preferred: what JAX looks at, one after the other.
  const liked = (torus, taken, split) => [
    product(split.filter((size, at) => size === torus[at])),
    split.filter((size, at) => size === torus[at] && size > 1).length,
    product(split.filter((_, at) => taken[at] > 1)), ...split];
  const isLess = (one, other) => {
    const at = one.findIndex((each, index) => each !== other[index]);
    return at >= 0 && one[at] < other[at];
  };
  const split = (torus, sizes) => {
    const parts = sizes.map(() => torus.map(() => 1));
    for (let axis = sizes.length - 1; axis >= 0; axis -= 1) {
      const taken = torus.map((_, at) => product(columns(parts, at)));
      const score = each => liked(torus, taken, each);
      parts[axis] = factored(sizes[axis], torus.map((size, at) => size / taken[at])).reduce(
        (best, each) => isLess(score(best), score(each)) ? each : best);
    }
    return parts;
  };

  const three = torus => torus.length >= 1 && torus.length <= 3
    ? [...torus, 1, 1].slice(0, 3)
    : refuse(`expected a torus of one to three dimensions; found (${torus.join(", ")})`);
  // {mesh axis: {sizes: along the dimensions of the torus that it spans, along: these, shared:
  // chips that share a link}}. A later axis takes neighbours; chips of an earlier one are as far
  // apart as its product.
  const spans = (shape, mesh) => {
    const torus = three(shape), axes = Object.keys(mesh), sizes = Object.values(mesh);
    const parts = whole(torus, sizes) ?? split(torus, sizes);
    return Object.fromEntries(parts.map((own, axis) => {
      const along = own.flatMap((size, at) => size > 1 ? [at] : []);
      const steps = along.map(at => product(columns(parts.slice(axis + 1), at)));
      return [axes[axis], {sizes: along.map(at => own[at]), along,
                           shared: Math.max(1, ...steps)}];
    }));
  };

  // machines.py

  const tuple = sizes => `(${sizes.join(", ")}${sizes.length === 1 ? "," : ""})`;
  // Devices of one kind: slices of TPUs, each a torus of this shape, or [so many] GPUs.
  const machineOf = (name, shape, slices = 1) => {
    const device = data.devices[name], {node} = device, size = product(shape) * slices;
    if (Math.min(...shape, slices) < 1) refuse("expected one device or more in each dimension, and "
      + `one slice or more; found ${tuple(shape)} and ${slices}`);
    if (device.switch && (shape.length > 1 || slices > 1)) refuse(
      `expected a number of ${name}, as a shape (number,); found ${tuple(shape)} and ${slices} `
      + "slices");
    if (device.switch && size > node && size % node)
      refuse(`expected whole nodes of ${node} ${name}; found ${size}`);
    if (slices > 1 && !device.network)
      refuse(`the network between slices of ${name} is not known`);
    return {device, shape, slices, size};
  };
  // Of each dimension of a slice, whether its ends are linked: of a cube, all or none.
  const ringsOf = ({device: {ring}, shape}) => {
    const linked = three(shape).map(size => ring > 0 && size % ring === 0);
    return shape.length === 3 ? linked.map(() => linked.every(each => each)) : linked;
  };
  const inNodes = ({device: {node}, size: all}, mesh) => {
    const found = {};
    let stride = 1;
    for (const [axis, size] of Object.entries(mesh).reverse()) {
      const first = upTo(Math.min(all / (stride * size), node) - 1).flatMap(block =>
        upTo(Math.min(stride, node) - 1).map(at => stride * size * block + at));
      const nodesOf = at => new Set(upTo(size - 1).map(i => floor(at + stride * i, node))).size;
      const near = floor(size, Math.max(...first.map(nodesOf)));
      found[axis] = {sizes: [near], rings: [false], shared: 1, near, apart: Math.ceil(size / near)};
      stride *= size;
    }
    return found;
  };
  const inSlices = (machine, mesh) => {
    const {shape, slices} = machine, torus = three(shape), rings = ringsOf(machine);
    const divided = Object.keys(mesh).find(axis => mesh[axis] % slices === 0);
    if (!divided) {
      const found = Object.entries(mesh).filter(([, size]) => size > 1)
        .map(([axis, size]) => `${axis}=${size}`).join(", ");
      refuse(`no axis of the mesh divides over ${slices} slices: ${found}`);
    }
    const inside = {...mesh, [divided]: mesh[divided] / slices}, found = spans(shape, inside);
    return Object.fromEntries(Object.entries(found).map(([axis, {sizes, along, shared}]) => [axis, {
      sizes, shared, near: inside[axis], apart: axis === divided ? slices : 1,
      rings: sizes.map((size, at) => rings[along[at]] && size === torus[along[at]])}]));
  };
  // {mesh axis: its group}: sizes along the dimensions of the torus that it spans, or in a node,
  // whether the ends of each are linked, groups that share a link, devices in one slice or node,
  // and over how many of these it lies.
  const groupsOf = (machine, mesh) =>
    machine.device.switch ? inNodes(machine, mesh) : inSlices(machine, mesh);
  const alongAll = groups => ({
    sizes: groups.flatMap(({sizes}) => sizes), rings: groups.flatMap(({rings}) => rings),
    shared: Math.max(...groups.map(({shared}) => shared)),
    near: product(groups.map(({near}) => near)), apart: product(groups.map(({apart}) => apart))});

  // What one of k devices sends over its links, for n bytes of a collective's result on it.
  const gathered = (k, n) => n * (k - 1) / k;
  const WIRE = {"all-reduce": (k, n) => 2 * gathered(k, n), "all-gather": gathered,
                "reduce-scatter": (k, n) => n * (k - 1), "all-to-all": gathered,
                "collective-permute": (k, n) => n};
  const wireBytes = (kind, ways, bytes) => WIRE[kind](ways, bytes);
  // How long the links of one device need for its part of some collectives: see Python.
  const wireSeconds = (kind, sizes, [count, bytes], device, ring = true) => {
    const wire = wireBytes(kind, product(sizes), bytes), {link, hop} = device;
    if (device.switch) return Math.max(wire / (device.links * link), count * hop);
    const rings = ring.length === undefined ? sizes.map(() => ring) : ring;
    const links = sizes.map((size, at) => rings[at] && size > 2 ? 2 : 1); // two chips share a link
    const across = sum(sizes.map((size, at) => rings[at] ? floor(size, 2) : size - 1));
    if (kind === "collective-permute") return Math.max(wire / link, count * hop);
    if (kind === "all-to-all") {
      const carried = sizes.map((size, at) => floor(size ** 2, 4) / size / links[at]);
      return Math.max(bytes * Math.max(...carried) / link, count * across * hop);
    }
    const used = Math.min(sum(links), device.links) * link;
    return Math.max(wire / used, count * (kind === "all-reduce" ? 2 : 1) * across * hop);
  };
  // Within a slice or node, and between them, whichever takes longer.
  const linkSeconds = (kind, group, bytes, device) => {
    const {sizes, rings, shared, near, apart} = group;
    const part = {"reduce-scatter": apart, "all-to-all": 1 / apart}[kind] ?? 1;
    const inside = near === 1 ? 0 : device.adds && kind === "all-reduce"
      ? bytes / (device.links * device.link)
      : shared * wireSeconds(kind, sizes, [0, part * bytes], device, rings);
    const share = kind === "all-reduce" || kind === "all-gather" ? near : 1;
    return apart === 1 ? inside
      : Math.max(inside, wireBytes(kind, apart, bytes / share) / device.network);
  };

  return {spans, machineOf, ringsOf, groupsOf, alongAll, wireBytes, wireSeconds, linkSeconds};
});
