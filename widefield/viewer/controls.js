// What surrounds the view: the panel, the line of what is under the pointer, pointers and keys.
"use strict";

const row = (...cells) => { const made = document.createElement("tr"); made.append(...cells); return made; };
function element(name, text, more = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  return Object.assign(made, more);
}
const counted = (value) => value.toLocaleString("en-US");
const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)} %`;

// ------------------------------------------------------------------------------------------------ the panel

function describe() {
  const [depth, height, width] = scene.extents;
  document.title = `${scene.name} - widefield view`;
  byId("name").textContent = scene.name;
  byId("scenes").hidden = WIDEFIELD.scenes.length < 2;
  byId("scenes").value = number;
  byId("about").textContent = `${depth > 1 ? counted(depth) + " x " : ""}${counted(height)} x ${counted(width)} px, ${scene.format}; ${scene.shown}`;
  describeLayers();
  describeClasses();
  describeMistakes();
  byId("planes").replaceChildren(...(scene.planes.length < 2 ? [] : [
    ...scene.planes.map((one) => element("button", ["depth", "row", "column"][one.plane], { onclick: () => { plane = one.plane; all = false; fit(); refresh(); } })),
    element("button", "all three", { onclick: () => { all = true; beside = false; fit(); refresh(); } }),
  ]));
}

function describeLayers() {
  byId("layers").replaceChildren(...NAMES.filter(has).map((name) => {
    const line = element("label"), box = element("input", undefined, { type: "checkbox", id: `show-${name}` });
    box.onchange = () => toggle(name);
    line.append(box, name);
    if (name === "probability") line.append(probabilityChoice());
    line.append(element("kbd", NAMES.indexOf(name) + 1));
    return line;
  }));
  const pair = LABELS.every(has);
  document.querySelector('[data-do="flicker"]').hidden = document.querySelector('[data-do="beside"]').hidden = !pair;
  document.querySelector('[data-do="cuts"]').hidden = !scene.cuts.some((inner) => inner.length);
  document.querySelector(".opacity").hidden = !LABELS.some(has) && !has("probability");
}

function probabilityChoice() {
  const choice = element("select", undefined, { ariaLabel: "class", onchange: () => { likely = Number(choice.value); refresh(); } });
  const count = scene.layers.filter((name) => name.startsWith("probability-")).length;
  const named = (index) => (scene.legend.find((one) => one.number === index) || { name: index }).name;
  choice.append(...Array.from({ length: count }, (_, index) => element("option", named(index), { value: index })));
  likely = clamp(likely, 0, count - 1);
  choice.value = likely;
  return choice;
}

const MOST_ROWS = 100;
function describeClasses() {
  const layers = LABELS.filter(has), compared = scene.compared > 0;
  byId("classes").hidden = !scene.legend.length;
  const heads = ["", ...layers.map((name) => (name === "truth" ? "truth" : "predicted")), ...(compared ? ["IoU"] : [])];
  const lines = scene.legend.slice(0, MOST_ROWS).map((one) => {
    const cell = element("td"), line = element("label"), box = element("input", undefined, { type: "checkbox", checked: !hidden.has(one.number) });
    box.onchange = () => { if (box.checked) hidden.delete(one.number); else hidden.add(one.number); recolour(); refresh(); };
    const patch = element("i");
    patch.style.setProperty("--colour", `rgb(${one.colour.join(" ")})`);
    line.append(box, patch, element("span", one.name));
    cell.append(line);
    const shares = layers.map((name) => element("td", percent(one[name])));
    return row(cell, ...shares, ...(compared ? [element("td", one.iou === undefined ? "–" : percent(one.iou))] : []));
  });
  const more = scene.legend.length - MOST_ROWS;
  if (more > 0) lines.push(row(element("td", `and ${counted(more)} more`)));
  byId("legend").replaceChildren(row(...heads.map((text) => element("th", text))), ...lines);
}

function describeMistakes() {
  byId("mistakes").hidden = !LABELS.every(has);
  byId("wrong").textContent = scene.compared
    ? `${counted(scene.wrong)} of ${counted(scene.compared)} compared pixels differ: ${percent(scene.wrong / scene.compared, 2)}`
    : "no pixel has a class in both";
  byId("worst").replaceChildren(...scene.worst.map((one) => {
    const isAlone = Math.max(scene.extents[1], scene.extents[2]) <= TILE; // the only window of its slice
    const places = [...(scene.extents[0] > 1 ? [`slice ${one.slice}`] : []), ...(isAlone ? [] : [`x ${Math.round(one.x)}, y ${Math.round(one.y)}`])];
    const where = places.join(", ") || "the image";
    const item = element("li"), link = element("a", where, { href: "#" });
    link.append(element("span", `${counted(one.wrong)} px, ${percent(one.wrong / one.of)}`));
    link.onclick = (event) => { event.preventDefault(); visit(one); };
    item.append(link);
    return item;
  }));
}

function visit(one) {
  plane = 0;
  all = false;
  const pane = panes()[0];
  zoom = Math.min(pane.width, pane.height) / one.side;
  at = [one.slice + 0.5, one.y, one.x];
  shown.add("disagreement");
  refresh();
}

function showControls() {
  for (const name of NAMES.filter(has)) byId(`show-${name}`).checked = shown.has(name);
  for (const [name, on] of [["beside", beside], ["cuts", cuts]]) document.querySelector(`[data-do="${name}"]`).ariaPressed = on;
  [...byId("planes").children].forEach((button, index) => { button.ariaPressed = index === 3 ? all : !all && facts(plane) === scene.planes[index]; });
  const axis = all ? 0 : plane, slice = byId("slice");
  byId("slices").hidden = scene.extents[axis] < 2 || (axis === 0 && scene.extents[0] < 2);
  slice.max = scene.extents[axis] - 1;
  slice.value = Math.floor(at[axis]);
  byId("at").textContent = `${counted(Math.floor(at[axis]))} of ${counted(scene.extents[axis])}`;
  byId("titles").replaceChildren(...panes().filter((pane) => pane.title).map((pane) => {
    const title = element("b", pane.title);
    Object.assign(title.style, { left: `${pane.left / ratio()}px`, top: `${pane.top / ratio()}px` });
    return title;
  }));
  showScale();
}

function showScale() {
  const spacing = scene.spacing.length ? scene.spacing[scene.spacing.length - 1] : 1;
  const longest = (130 * ratio() * spacing) / zoom, ten = 10 ** Math.floor(Math.log10(longest));
  const length = [5, 2, 1].map((times) => times * ten).find((one) => one <= longest) || ten;
  const unitName = scene.spacing.length ? { um: "µm", deg: "°" }[scene.unit] || scene.unit : "px";
  byId("scale").style.width = `${((length / spacing) * zoom) / ratio()}px`;
  byId("scale").firstChild.textContent = `${Number(length.toPrecision(3)).toLocaleString("en-US", { maximumFractionDigits: 9 })} ${unitName}`;
}

// ------------------------------------------------------------------------------------------------ under the pointer

// The number of a pixel: of the finest level where that is there, else of the level that is drawn.
function numberAt(name, pane, position) {
  for (const level of [pane.start, levelOf(pane, false)]) {
    const pixel = [pane.rows, pane.columns].map((axis) => Math.floor(position[axis] / 2 ** level));
    const key = keyOf(name, pane, level, Math.floor(pixel[0] / TILE), Math.floor(pixel[1] / TILE));
    const tile = rested ? tileOf(key, suffixOf(name)) : tiles.get(key);
    if (WIDEFIELD.same[key] !== undefined) return [WIDEFIELD.same[key], level];
    if (!tile || !tile.numbers) continue;
    const wide = Math.min(TILE, Math.ceil(scene.extents[pane.columns] / 2 ** level) - Math.floor(pixel[1] / TILE) * TILE);
    return [tile.numbers[(pixel[0] % TILE) * wide + (pixel[1] % TILE)], level];
  }
  return [undefined, 0];
}

function showStatus() {
  const pane = pointer ? pointer.pane : panes()[0], position = pointer ? positionAt(pane, pointer.x, pointer.y) : at;
  const pixel = position.map(Math.floor), parts = [];
  const add = (html, text, kind) => { const part = element("span"); part.append(element(html, text, { className: kind || "" })); parts.push(part); return part; };
  if (pixel.some((index, axis) => index < 0 || index >= scene.extents[axis])) {
    byId("status").replaceChildren(element("i", "outside of the image"));
    return;
  }
  add("b", `x ${pixel[2]}  y ${pixel[1]}${scene.extents[0] > 1 ? `  z ${pixel[0]}` : ""}`);
  const place = worldOf(pixel);
  if (place) add("i", place);
  const found = {};
  for (const name of NAMES.slice(1).filter((one) => has(one) && one !== "disagreement")) {
    const [value, level] = numberAt(name, pane, position);
    found[name] = value;
    if (value === undefined) continue;
    const text = name === "probability" ? percent(value / 255) : nameOf(value);
    add("i", `${name} `).append(element("b", (level ? "≈ " : "") + text));
  }
  if (found.prediction && found.truth && found.prediction !== found.truth) add("b", "differs", "wrong");
  byId("status").replaceChildren(...parts);
}

const nameOf = (value) => (value ? (scene.legend.find((one) => one.number === value - 1) || { name: value - 1 }).name : "no class");

function worldOf(pixel) {
  const spacing = scene.spacing, index = pixel.slice(3 - (scene.affine.length ? scene.affine.length - 1 : spacing.length || 3));
  const digits = spacing.length ? clamp(Math.ceil(1 - Math.log10(Math.min(...spacing))), 0, 9) : 3;
  const unitName = { um: "µm", deg: "°" }[scene.unit] || scene.unit;
  if (scene.affine.length) {
    const letters = /^[A-Z]{2,3}$/.test(scene.world) ? scene.world.split("") : [];
    const values = scene.affine.slice(0, -1).map((line) => line.reduce((sum, factor, axis) => sum + factor * (axis < index.length ? index[axis] : 1), 0));
    const texts = values.map((value, axis) => `${letters[axis] ? letters[axis] + " " : ""}${value.toFixed(digits)}`);
    return `${texts.join(letters.length ? "  " : ", ")} ${unitName} ${letters.length ? "" : scene.world}`.trim();
  }
  if (!spacing.length) return "";
  return `${index.map((one, axis) => (one * spacing[axis]).toFixed(digits)).reverse().join(", ")} ${unitName}`;
}

// ------------------------------------------------------------------------------------------------ what is done

let drawing = 0;
function refresh() {
  showControls();
  writeFragment();
  changed();
}
changed = () => { drawing = drawing || requestAnimationFrame(draw); };

function resize() {
  const [width, height] = [canvas.clientWidth, canvas.clientHeight].map((length) => Math.max(1, Math.round(length * ratio())));
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
}

function toggle(name) {
  if (!has(name)) return;
  if (shown.has(name)) shown.delete(name);
  else shown.add(name);
  refresh();
}

function flicker() {
  if (!LABELS.every(has)) return;
  const next = shown.has("prediction") ? "truth" : "prediction";
  for (const name of LABELS) shown.delete(name);
  shown.add(next);
  refresh();
}

function move(rows, columns) {
  const pane = panes()[0];
  at[pane.rows] = clamp(at[pane.rows] + (rows * pane.height) / scale(pane.rows) * sign(pane.rows), 0, scene.extents[pane.rows]);
  at[pane.columns] = clamp(at[pane.columns] + (columns * pane.width) / scale(pane.columns) * sign(pane.columns), 0, scene.extents[pane.columns]);
  refresh();
}

function slide(by) {
  const axis = all ? 0 : plane;
  at[axis] = clamp(Math.floor(at[axis]) + by, 0, scene.extents[axis] - 1) + 0.5;
  refresh();
}

function zoomAtCentre(factor) {
  const pane = panes()[0];
  zoomBy(factor, pane, pane.left + pane.width / 2, pane.top + pane.height / 2);
  refresh();
}

const ACTIONS = {
  closer: () => zoomAtCentre(1.5), farther: () => zoomAtCentre(1 / 1.5), fit: () => { fit(); refresh(); },
  pixels: () => { zoom = 1; refresh(); }, flicker, beside: () => { if (LABELS.every(has)) { beside = !beside; all = false; refresh(); } },
  cuts: () => { cuts = !cuts; refresh(); }, panel: () => { byId("panel").classList.toggle("closed"); resize(); refresh(); },
};
const KEYS = {
  "+": ACTIONS.closer, "=": ACTIONS.closer, "-": ACTIONS.farther, f: ACTIONS.fit, 0: ACTIONS.fit, p: ACTIONS.pixels, " ": flicker,
  s: ACTIONS.beside, c: ACTIONS.cuts, m: ACTIONS.panel, PageUp: () => slide(-1), PageDown: () => slide(1),
  ArrowUp: () => move(-0.1, 0), ArrowDown: () => move(0.1, 0), ArrowLeft: () => move(0, -0.1), ArrowRight: () => move(0, 0.1),
};

addEventListener("keydown", (event) => {
  const typed = event.key === " " ? "button, a, input, select" : "input[type=range], select"; // these have keys of their own
  if (event.ctrlKey || event.metaKey || event.altKey || (event.target.matches && event.target.matches(typed))) return;
  const action = KEYS[event.key] || (NAMES[event.key - 1] && (() => toggle(NAMES[event.key - 1])));
  if (!action) return;
  event.preventDefault();
  action();
});
document.querySelectorAll("[data-do]").forEach((button) => { button.onclick = () => { ACTIONS[button.dataset.do](); canvas.focus(); }; });
byId("panel").addEventListener("click", (event) => { if (event.detail && !event.target.matches("select")) canvas.focus(); });
byId("opacity").oninput = (event) => { opacity = event.target.value / 100; refresh(); };
byId("slice").oninput = (event) => { at[all ? 0 : plane] = Number(event.target.value) + 0.5; refresh(); };
byId("scenes").onchange = (event) => { openScene(Number(event.target.value)); fit(); refresh(); };

// ------------------------------------------------------------------------------------------------ pointers

let resting = 0;
function point(event) {
  const x = event.offsetX * ratio(), y = event.offsetY * ratio();
  const pane = panes().find((one) => x < one.left + one.width && y < one.top + one.height) || panes()[0];
  rested = false;
  clearTimeout(resting);
  resting = setTimeout(() => { rested = true; changed(); }, 120);
  return { x, y, pane };
}

canvas.onpointerdown = (event) => {
  canvas.setPointerCapture(event.pointerId);
  fingers.set(event.pointerId, (pointer = point(event)));
  changed();
};
canvas.onpointermove = (event) => {
  const before = fingers.get(event.pointerId), now = point(event);
  pointer = now;
  if (before) {
    const other = [...fingers].find(([id]) => id !== event.pointerId), pane = before.pane;
    for (const [axis, by] of [[pane.columns, now.x - before.x], [pane.rows, now.y - before.y]]) {
      at[axis] = clamp(at[axis] - by / scale(axis) * sign(axis) / fingers.size, 0, scene.extents[axis]);
    }
    if (other) {
      const apart = (one) => Math.max(1, Math.hypot(one.x - other[1].x, one.y - other[1].y));
      zoomBy(apart(now) / apart(before), pane, (now.x + other[1].x) / 2, (now.y + other[1].y) / 2);
    }
    fingers.set(event.pointerId, { ...now, pane });
    refresh();
  }
  changed();
};
canvas.onpointerup = canvas.onpointercancel = (event) => { fingers.delete(event.pointerId); };
canvas.onpointerleave = (event) => { if (event.pointerType === "mouse") { pointer = null; changed(); } };
canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  pointer = point(event);
  const lines = event.deltaMode === 1 ? 33 : 1;
  zoomBy(Math.exp(clamp(-event.deltaY * lines, -400, 400) * 0.002), pointer.pane, pointer.x, pointer.y);
  refresh();
}, { passive: false });

addEventListener("resize", () => { resize(); refresh(); });
addEventListener("hashchange", readFragment);
byId("scenes").append(...WIDEFIELD.scenes.map((one, index) => element("option", one.name + (one.compared ? `, ${percent(one.wrong / one.compared)} wrong` : ""), { value: index })));
if (innerWidth <= 760) byId("panel").classList.add("closed");
rested = true;
readFragment();
