// The pictures of the sharding explorer: pieces of a tensor, and a mesh, in the colours of devices.
"use strict";

const meshbookPictures = (() => {
  const {element, drawn, commas} = meshbookForm, {product} = meshbook;
  const some = (count, word) => `${commas(count)} ${word}${count === 1 ? "" : "s"}`;
  const [colour, ink] = [0, 1].map(
    at => device => meshbookColours[device % meshbookColours.length][at]);
  const picture = (width, height, label, ...body) =>
    drawn("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label,
                  style: `width:100%;max-width:${width}px;height:auto`}, ...body);
  const square = (x, y, width, height, fill, more = {}) =>
    drawn("rect", {x, y, width, height, fill, ...more});

  // A device's place along some axes of the mesh, as one number: the last axis counts first.
  const place = (device, axes, sizes) => {
    const names = Object.keys(sizes);
    const along = axis => Math.floor(device / product(
      names.slice(names.indexOf(axis) + 1).map(name => sizes[name]))) % sizes[axis];
    return axes.reduce((found, axis) => found * sizes[axis] + along(axis), 0);
  };
  const devicesOf = sizes => Array.from({length: product(Object.values(sizes))}, (_, at) => at);

  // Small squares, one for each device, as large as the tile has room for.
  const chips = (x, y, width, height, devices) => {
    let columns = 1;
    const rows = () => Math.ceil(devices.length / columns);
    while (width / columns > height / rows() && columns < devices.length) columns++;
    const side = Math.min(width / columns, height / rows(), 14);
    return devices.map((device, at) => square(
      x + side * (at % columns) + side * 0.1, y + side * Math.floor(at / columns) + side * 0.1,
      side * 0.8, side * 0.8, colour(device), {"data-device": device}));
  };
  // The tiles of a tensor: the last dimension that is split goes to the right, those before it
  // downwards, and one that is alone and the first.
  const tiles = ({spec}, sizes) => {
    const split = spec.map(axes => axes.filter(axis => sizes[axis] > 1));
    const at = split.findLastIndex(axes => axes.length);
    const isDown = at === 0 && spec.length > 1;
    const right = at < 0 || isDown ? [] : split[at];
    const down = isDown ? split[0] : split.slice(0, Math.max(at, 0)).flat();
    const [columns, rows] = [right, down].map(axes => product(axes.map(axis => sizes[axis])));
    const [width, height] = [150, spec.length > 1 ? 64 : 26];
    const [wide, high] = [width / columns, height / rows], body = [];
    const gap = Math.min(2, wide / 6, high / 6), devices = devicesOf(sizes);
    for (let row = 0; row < rows; row++)
      for (let column = 0; column < columns; column++) {
        const own = devices.filter(device =>
          place(device, down, sizes) === row && place(device, right, sizes) === column);
        const box = [1 + wide * column, 1 + high * row, wide - gap, high - gap];
        body.push(...own.length === 1
          ? [square(...box, colour(own[0]), {"data-device": own[0]})]
          : [square(...box, "none", {stroke: "currentColor", "stroke-opacity": 0.6}),
             ...chips(box[0] + gap, box[1] + gap, box[2] - 2 * gap, box[3] - 2 * gap, own)]);
      }
    const words = `${some(rows * columns, "piece")}, each on `
      + some(devices.length / rows / columns, "device");
    return [picture(width + 2, height + 2, words, ...body), words];
  };

  // The last axis to the right, the others downwards; a tall mesh is turned.
  const meshOf = sizes => {
    const axes = Object.keys(sizes).filter(axis => sizes[axis] > 1 || axis === "model");
    const [across, along] = [axes.slice(-1), axes.length > 1 ? axes.slice(0, -1) : ["batch"]];
    const [columns, rows] = [across, along].map(some => product(some.map(axis => sizes[axis])));
    const turned = rows > 8 && rows > columns, body = [];
    const [wide, high] = turned ? [rows, columns] : [columns, rows];
    const [right, down] = turned ? [along, across] : [across, along];
    const side = Math.min(28, 640 / wide), devices = devicesOf(sizes);
    for (const device of devices) {
      const [x, y] = [right, down].map(some => place(device, some, sizes));
      body.push(square(side * x + 1, side * y + 1, side - 2, side - 2, colour(device), {rx: 2}));
      if (side > 20) body.push(drawn("text", {x: side * (x + 0.5), y: side * (y + 0.5) + 4,
        "font-size": 12, "text-anchor": "middle", fill: ink(device)}, device));
    }
    const named = some => some.join(", then ");
    return element("figure", {className: "explorer-mesh"},
      picture(side * wide, side * high, `A mesh of ${high} by ${wide} devices`, ...body),
      element("figcaption", {}, `${some(devices.length, "device")}: ${named(down)} downwards, `
        + `${named(right)} to the right`));
  };

  return {some, picture, square, tiles, meshOf};
})();
