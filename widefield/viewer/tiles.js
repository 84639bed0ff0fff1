// Tiles: pictures of the image, and numbers that scripts hand over, deflated and in base64.
// A page that is opened from disk may show pictures but not look into them, so what is to be read comes as numbers.
"use strict";

const TILE = WIDEFIELD.tile;
const MOST_TILES = 400; // in memory, each of a megabyte
const tiles = new Map(); // by key, the one that was used longest ago first
let waiting = 0;
let changed = () => {}; // called when a tile has come

// The tile of a key, such as 0/truth/0-3/2/1_0: scene, layer, plane and slice, level, row and column.
// state: "waiting", "ready" or "missing".  same: its number, where all pixels have one.  picture: what is drawn.
function tileOf(key, suffix) {
  let tile = tiles.get(key);
  if (tile) tiles.delete(key);
  else tile = begun(key, suffix);
  tiles.set(key, tile);
  return tile;
}

function begun(key, suffix) {
  const same = WIDEFIELD.same[key];
  const tile = { key, state: "waiting", picture: null, numbers: null, same: same, version: -1 };
  if (same !== undefined) {
    tile.state = "ready";
    return tile;
  }
  waiting++;
  const source = document.createElement(suffix === "js" ? "script" : "img");
  source.onerror = () => settle(tile, "missing");
  if (suffix === "js") {
    document.head.append(source);
  } else {
    source.onload = () => { tile.picture = source; settle(tile, "ready"); };
  }
  source.src = `tiles/${key}.${suffix}`;
  tile.source = source;
  return tile;
}

function settle(tile, state) {
  if (tile.state !== "waiting") return;
  waiting--;
  tile.state = state;
  if (tile.source && tile.source.tagName === "SCRIPT") tile.source.remove();
  tile.source = null;
  changed();
}

// Called by the scripts of tiles.
async function widefieldTile(key, text) {
  const tile = tiles.get(key);
  if (!tile) return; // it was dropped before it came
  try {
    const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    const plain = await new Response(stream).arrayBuffer();
    tile.numbers = WIDEFIELD.scenes[key.split("/")[0]].wide && isLabels(key) ? words(plain) : new Uint8Array(plain);
    settle(tile, "ready");
  } catch (error) {
    settle(tile, "missing");
    document.body.dataset.error = `${key}: ${error}`;
  }
}

function isLabels(key) {
  return ["prediction", "truth"].includes(key.split("/")[1]);
}

function words(plain) {
  const view = new DataView(plain);
  return Uint16Array.from({ length: plain.byteLength / 2 }, (_, index) => view.getUint16(2 * index, true));
}

// A canvas of a tile's numbers, painted by a table of colours (0xAABBGGRR by number), anew for each version of it.
function painted(tile, width, height, table, version) {
  if (tile.version === version) return tile.picture;
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  const image = new ImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  if (tile.same !== undefined) pixels.fill(table[tile.same]);
  else for (let index = 0; index < pixels.length; index++) pixels[index] = table[tile.numbers[index]];
  canvas.getContext("2d").putImageData(image, 0, 0);
  tile.picture = canvas;
  tile.version = version;
  return canvas;
}

// Forget the tiles that were used longest ago.
function dropTiles() {
  for (const [key, tile] of tiles) {
    if (tiles.size <= MOST_TILES) return;
    if (tile.state !== "waiting") tiles.delete(key);
  }
}
