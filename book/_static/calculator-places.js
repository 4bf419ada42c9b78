// Where a mesh's axes lie on a torus of chips, as JAX lays them: meshbook.costs.places in
// JavaScript. tests/book/test_calculator_plans.py holds it to what JAX does.
"use strict";

meshbook.places = (() => {
  const {product} = meshbook;
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

  // [[sizes along the dimensions of the torus, chips that share a link]] of each axis of a mesh.
  // A later axis takes neighbours; chips of an earlier one are as far apart as its product.
  const spans = (torus, sizes) => {
    const parts = whole(torus, sizes) ?? split(torus, sizes);
    return parts.map((own, axis) => {
      const along = own.flatMap((size, at) => size > 1 ? [at] : []);
      const steps = along.map(at => product(columns(parts.slice(axis + 1), at)));
      return [along.map(at => own[at]), Math.max(1, ...steps)];
    });
  };
  return {spans};
})();
