// The view: a position in the file's pixels, a zoom, and the layers that are shown.
// Axes are 0 depth, 1 rows, 2 columns.  A pane shows a slice of one plane; all panes share the position and the zoom.
"use strict";

const LABELS = ["prediction", "truth"];
const NAMES = ["image", "prediction", "truth", "disagreement", "probability"]; // in the order of keys and of drawing
const WRONG = [255, 64, 48], LIKELY = [250, 214, 55];
const byId = (id) => document.getElementById(id);
const canvas = byId("canvas"), pen = canvas.getContext("2d");

let scene, number = 0; // its place among the scenes
let at = [0.5, 0, 0]; // the position in the middle of the panes
let zoom = 1; // pixels of the screen per column of the image
let shown = new Set(), hidden = new Set(); // layers; classes
let plane = 0, beside = false, all = false, cuts = false, likely = 0, opacity = 0.6;
let version = 0, tables = {}; // colours by number
let pointer = null, rested = false;
const fingers = new Map();

const ratio = () => window.devicePixelRatio || 1;
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
const has = (name) => scene.layers.includes(name === "probability" ? "probability-0" : name);
const facts = (which) => scene.planes.find((one) => one.plane === which);

// ------------------------------------------------------------------------------------------------ scene and fragment

function openScene(which) {
  number = clamp(which, 0, WIDEFIELD.scenes.length - 1);
  scene = WIDEFIELD.scenes[number];
  shown = new Set(["image", has("prediction") ? "prediction" : "truth"].filter(has));
  hidden = new Set([0]); // the class over which the image is to be seen
  plane = 0;
  all = false;
  beside = beside && LABELS.every(has);
  at = scene.extents.map((extent) => extent / 2);
  at[0] = Math.floor(at[0]) + 0.5;
  recolour();
  describe();
}

function readFragment() {
  const given = new URLSearchParams(location.hash.slice(1));
  const value = (key) => (given.has(key) && given.get(key) !== "" ? Number(given.get(key)) : NaN);
  if (!scene || (given.has("scene") && value("scene") !== number)) openScene(value("scene") || 0);
  if (given.has("show")) shown = new Set(given.get("show").split(",").filter(has));
  if (facts(value("plane"))) plane = value("plane");
  if (given.has("beside")) beside = value("beside") === 1 && LABELS.every(has);
  if (given.has("planes")) all = value("planes") === 1 && scene.planes.length > 1;
  if (given.has("cut")) cuts = value("cut") === 1;
  if (given.has("opacity")) byId("opacity").value = 100 * (opacity = clamp(value("opacity"), 0, 1));
  if (given.has("panel")) byId("panel").classList.toggle("closed", value("panel") === 0);
  resize();
  if (!(value("zoom") > 0)) fit();
  else zoom = value("zoom") * ratio();
  ["z", "y", "x"].forEach((key, axis) => { if (!isNaN(value(key))) at[axis] = clamp(value(key), 0, scene.extents[axis] - 1e-6); });
  refresh();
}

let writing = 0;
function writeFragment() {
  clearTimeout(writing);
  writing = setTimeout(() => {
    const place = { x: at[2].toFixed(2), y: at[1].toFixed(2), zoom: (zoom / ratio()).toPrecision(6), show: [...shown].join(",") };
    if (number) place.scene = number;
    if (scene.extents[0] > 1) Object.assign(place, { z: at[0].toFixed(2), plane, planes: all ? 1 : 0 });
    Object.assign(place, { beside: beside ? 1 : 0, cut: cuts ? 1 : 0 });
    if (byId("panel").classList.contains("closed")) place.panel = 0;
    history.replaceState(null, "", "#" + Object.entries(place).map(([key, text]) => `${key}=${text}`).join("&"));
  }, 400);
}

// ------------------------------------------------------------------------------------------------ geometry

// How much longer a pixel is on an axis than on that of columns, where the file says so and it matters.
function unit(axis) {
  const spacing = scene.spacing, first = 3 - spacing.length, own = spacing[axis - first] / spacing[spacing.length - 1];
  return own > 1.01 || own < 0.99 ? clamp(own, 0.02, 50) : 1;
}

const scale = (axis) => zoom * unit(axis);

// Where an axis of a volume leads, as L (left), P (behind) and I (below) in RAS, and whether it is mirrored on the screen:
// patients are shown upright, from the front or from their left.
const OPPOSITE = { R: "L", L: "R", A: "P", P: "A", S: "I", I: "S" };
function leads(axis) {
  const column = axis - (4 - scene.affine.length), lines = scene.affine.slice(0, -1).map((line) => line[column]);
  if (scene.extents[0] < 2 || !lines.length || ![...scene.world].every((letter) => letter in OPPOSITE)) return "";
  const most = lines.reduce((best, value, index) => (Math.abs(value) > Math.abs(lines[best]) ? index : best), 0);
  return lines[most] > 0 ? scene.world[most] : OPPOSITE[scene.world[most]];
}
const sign = (axis) => ("RAS".includes(leads(axis) || "-") ? -1 : 1);

function panes() {
  const titled = (title, layers, which) => ({ title, layers, ...facts(which) });
  let found = [titled("", shown, plane)];
  if (all) found = scene.planes.map((one) => titled(["depth", "row", "column"][one.plane], shown, one.plane));
  else if (beside) found = LABELS.map((own) => titled(own, new Set([...shown].filter((name) => !LABELS.includes(name)).concat(own)), plane));
  const { width, height } = canvas, across = width >= height ? found.length : 1, down = found.length / across;
  return found.map((pane, index) => ({
    ...pane, left: Math.round((index % across) * width / across), top: Math.round(Math.floor(index / across) * height / down),
    width: Math.floor(width / across), height: Math.floor(height / down),
  }));
}

// Where a position on an axis is on the screen, as a whole number, so that tiles meet without a seam.
function edge(pane, axis, position) {
  const [start, length] = axis === pane.columns ? [pane.left, pane.width] : [pane.top, pane.height];
  return start + Math.round((position - at[axis]) * scale(axis) * sign(axis) + length / 2);
}

const edges = (pane, axis, start, stop) => [start, stop].map((one) => edge(pane, axis, one)).sort((a, b) => a - b);

function positionAt(pane, x, y) {
  const found = [...at];
  found[pane.columns] += (x - pane.left - pane.width / 2) / scale(pane.columns) * sign(pane.columns);
  found[pane.rows] += (y - pane.top - pane.height / 2) / scale(pane.rows) * sign(pane.rows);
  return found;
}

// All of the image in every pane.
function fit() {
  zoom = 16 * ratio();
  const most = panes().flatMap((pane) => [[pane.columns, pane.width], [pane.rows, pane.height]]);
  zoom = Math.min(zoom, ...most.map(([axis, length]) => length / (scene.extents[axis] * unit(axis))));
  for (const axis of all ? [1, 2] : [panes()[0].rows, panes()[0].columns]) at[axis] = scene.extents[axis] / 2;
}

function zoomBy(factor, pane, x, y) {
  const before = positionAt(pane, x, y);
  zoom = clamp(zoom * factor, 0.5 / Math.max(...scene.extents), 64 * ratio());
  const after = positionAt(pane, x, y);
  for (const axis of [pane.rows, pane.columns]) at[axis] = clamp(at[axis] + before[axis] - after[axis], 0, scene.extents[axis]);
}

// ------------------------------------------------------------------------------------------------ drawing

// Pictures are drawn at up to half their size; a pixel of numbers is never smaller than one of the screen, so none is skipped.
function levelOf(pane, isPicture) {
  const scales = [scale(pane.rows), scale(pane.columns)];
  const level = isPicture ? Math.floor(1e-6 - Math.log2(Math.max(...scales))) : Math.ceil(-1e-6 - Math.log2(Math.min(...scales)));
  return clamp(level, pane.start, pane.levels - 1);
}

const layerOf = (name) => (name === "probability" ? `probability-${likely}` : name);
const sliceOf = (pane) => clamp(Math.floor(at[pane.plane]), 0, scene.extents[pane.plane] - 1);
const keyOf = (name, pane, level, row, column) =>
  `${number}/${layerOf(name)}/${pane.plane}-${sliceOf(pane)}/${level}/${row}_${column}`;
const suffixOf = (name) => (name === "image" ? scene.suffix : "js");

function draw() {
  drawing = 0;
  pen.fillStyle = "#0b0c0e";
  pen.fillRect(0, 0, canvas.width, canvas.height);
  for (const pane of panes()) {
    pen.save();
    pen.beginPath();
    pen.rect(pane.left, pane.top, pane.width, pane.height);
    pen.clip();
    pen.beginPath();
    const [[top, bottom], [left, right]] = [pane.rows, pane.columns].map((axis) => edges(pane, axis, 0, scene.extents[axis]));
    pen.rect(left, top, right - left, bottom - top);
    pen.clip();
    for (const name of NAMES) if (pane.layers.has(name)) drawLayer(pane, name);
    if (cuts) drawCuts(pane);
    pen.restore();
    if (all) drawCross(pane);
    drawLetters(pane);
    pen.fillStyle = "#5c6168"; // between panes
    if (pane.left) pen.fillRect(pane.left, pane.top, ratio(), pane.height);
    if (pane.top) pen.fillRect(pane.left, pane.top, pane.width, ratio());
  }
  dropTiles();
  showStatus();
  document.body.dataset.waiting = waiting;
}

function drawLayer(pane, name) {
  const level = levelOf(pane, name === "image"), step = TILE * 2 ** level;
  const range = (axis, length) => {
    const half = length / 2 / scale(axis), last = Math.ceil(scene.extents[axis] / step) - 1;
    return [clamp(Math.floor((at[axis] - half) / step), 0, last), clamp(Math.floor((at[axis] + half) / step), 0, last)];
  };
  const [firstRow, lastRow] = range(pane.rows, pane.height), [firstColumn, lastColumn] = range(pane.columns, pane.width);
  pen.globalAlpha = LABELS.includes(name) || name === "probability" ? opacity : 1;
  pen.imageSmoothingEnabled = name === "image" && Math.max(scale(pane.rows), scale(pane.columns)) * 2 ** level < 1;
  for (let row = firstRow; row <= lastRow; row++) {
    for (let column = firstColumn; column <= lastColumn; column++) drawTile(pane, name, level, row, column);
  }
}

// A tile, or while it is not there the part of a coarser one that covers it.
function drawTile(pane, name, level, row, column) {
  const size = [row, column].map((index, which) => {
    const extent = scene.extents[which ? pane.columns : pane.rows];
    return Math.min(TILE, Math.ceil(extent / 2 ** level) - index * TILE);
  });
  const starts = [row, column].map((index) => index * TILE * 2 ** level);
  const [left, right] = edges(pane, pane.columns, starts[1], starts[1] + size[1] * 2 ** level);
  const [top, bottom] = edges(pane, pane.rows, starts[0], starts[0] + size[0] * 2 ** level);
  for (let up = 0; level + up < pane.levels; up++) {
    const [theirRow, theirColumn] = [row >> up, column >> up];
    const key = keyOf(name, pane, level + up, theirRow, theirColumn);
    const tile = up === 0 || level + up === pane.levels - 1 ? tileOf(key, suffixOf(name)) : tiles.get(key);
    if (!tile || tile.state !== "ready") continue;
    if (tile.same !== undefined && (name === "image" || !tables[layerOf(name)][tile.same])) return; // nothing to be seen
    const [high, wide] = [[theirRow, pane.rows], [theirColumn, pane.columns]].map(([index, axis]) =>
      Math.min(TILE, Math.ceil(scene.extents[axis] / 2 ** (level + up)) - index * TILE));
    const picture = name === "image" ? tile.picture : painted(tile, wide, high, tables[layerOf(name)], version);
    const part = (index) => ((index * TILE) / 2 ** up) % TILE;
    const [across, down] = [sign(pane.columns), sign(pane.rows)];
    pen.setTransform(across, 0, 0, down, across < 0 ? left + right : 0, down < 0 ? top + bottom : 0);
    pen.drawImage(picture, part(column), part(row), size[1] / 2 ** up, size[0] / 2 ** up, left, top, right - left, bottom - top);
    pen.setTransform(1, 0, 0, 1, 0, 0);
    return;
  }
}

function drawCuts(pane) {
  const thick = Math.max(1, Math.round(ratio()));
  pen.globalAlpha = 1;
  pen.fillStyle = "#ffd84d";
  for (const row of scene.cuts[pane.rows]) pen.fillRect(pane.left, edge(pane, pane.rows, row), pane.width, thick);
  for (const column of scene.cuts[pane.columns]) pen.fillRect(edge(pane, pane.columns, column), pane.top, thick, pane.height);
}

function drawCross(pane) {
  pen.globalAlpha = 0.5;
  pen.fillStyle = "#ffd84d";
  pen.fillRect(pane.left, edge(pane, pane.rows, at[pane.rows]), pane.width, 1);
  pen.fillRect(edge(pane, pane.columns, at[pane.columns]), pane.top, 1, pane.height);
  pen.globalAlpha = 1;
}

// The letters of a volume's directions, at the sides of a pane.
function drawLetters(pane) {
  const middle = [pane.left + pane.width / 2, pane.top + pane.height / 2], size = 14 * ratio();
  pen.font = `600 ${size}px system-ui, sans-serif`;
  pen.textAlign = "center";
  pen.strokeStyle = "#000";
  pen.lineWidth = 3 * ratio();
  pen.fillStyle = "#fff";
  const top = pane.top + (pane.title ? 4 : 2) * size, bottom = pane.top + pane.height - byId("bottom").offsetHeight * ratio();
  for (const [axis, [first, last]] of [
    [pane.columns, [[pane.left + size, middle[1]], [pane.left + pane.width - size, middle[1]]]],
    [pane.rows, [[middle[0], top], [middle[0], bottom]]],
  ]) {
    const high = leads(axis), ends = sign(axis) < 0 ? [high, OPPOSITE[high]] : [OPPOSITE[high], high];
    if (high) [first, last].forEach((place, index) => { pen.strokeText(ends[index], ...place); pen.fillText(ends[index], ...place); });
  }
}

function recolour() {
  const colour = ([red, green, blue], alpha) => ((alpha << 24) | (blue << 16) | (green << 8) | red) >>> 0;
  const of = new Uint32Array(scene.wide ? 65536 : 256);
  for (const one of scene.legend) if (!hidden.has(one.number)) of[one.number + 1] = colour(one.colour, 255);
  tables = { prediction: of, truth: of };
  tables.disagreement = Uint32Array.from({ length: 256 }, (_, share) => (share ? colour(WRONG, Math.round(115 + 140 * share / 255)) : 0));
  const heat = Uint32Array.from({ length: 256 }, (_, share) => colour(LIKELY, share));
  for (const name of scene.layers) if (name.startsWith("probability-")) tables[name] = heat;
  version++;
}
