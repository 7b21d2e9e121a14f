/** Draws the KV cache as squares: blocks that requests use, cached blocks, and free blocks. */

import { begin, describe, label } from "./canvas.js";
import { integer, percent } from "./format.js";
import { explain } from "./tooltip.js";

const SQUARE = 11;
const LEGEND = 18;

/** Draw the cache of `state`. */
export function drawBlocks(canvas, state, palette) {
  const { context, width, height } = begin(canvas);
  const cache = state.cache;
  if (!cache) {
    label(context, "No step yet", width / 2, height / 2, palette.muted, "center");
    describe(canvas, "KV cache: no step yet");
    explain(canvas, () => null);
    return;
  }
  const perRow = Math.floor(width / SQUARE);
  const room = perRow * Math.floor((height - LEGEND) / SQUARE);
  const perSquare = Math.max(1, Math.ceil(cache.numBlocks / room));
  const squares = Math.ceil(cache.numBlocks / perSquare);
  const numUsed = Math.ceil(cache.numUsed / perSquare);
  const numCached = Math.min(squares - numUsed, Math.ceil(cache.numCached / perSquare));
  const owners = shares(state.live, numUsed);
  for (let i = 0; i < squares; i += 1) {
    const x = (i % perRow) * SQUARE;
    const y = Math.floor(i / perRow) * SQUARE;
    drawSquare(context, x, y, kind(i, numUsed, numCached, owners), palette);
  }
  const scale = perSquare === 1 ? "1 square is a block" : `1 square is ${perSquare} blocks`;
  label(context, scale, 0, height - 6, palette.muted);
  explain(canvas, (x, y) => tell(Math.floor(y / SQUARE) * perRow + Math.floor(x / SQUARE)));
  function tell(i) {
    if (i < 0 || i >= squares) return null;
    const what = kind(i, numUsed, numCached, owners);
    if (!what.startsWith("used")) return [what === "free" ? "free" : "cached for prompts to come"];
    const owner = state.live[owners.findIndex((end) => i < end)];
    return owner ? [`in use by #${owner.id.split("-", 1)[0]}`] : ["in use"];
  }
  describe(canvas, `KV cache of ${integer(cache.numBlocks)} blocks: ${integer(cache.numUsed)} in use ` +
    `(${percent(cache.numUsed / cache.numBlocks)}), ${integer(cache.numCached)} cached, ` +
    `${integer(cache.numBlocks - cache.numUsed - cache.numCached)} free`);
}

/**
 * Divides the squares in use among requests, by how much each has computed.
 *
 * @returns {number[]} ends of the requests' runs; blocks that requests share shorten all runs
 */
function shares(streams, numUsed) {
  const sizes = streams.map((stream) => stream.numComputed);
  const total = sizes.reduce((sum, size) => sum + size, 0);
  let sum = 0;
  return sizes.map((size) => {
    sum += size;
    return Math.round((sum / Math.max(1, total)) * numUsed);
  });
}

function kind(i, numUsed, numCached, owners) {
  if (i < numUsed) return owners.findIndex((end) => i < end) % 2 === 0 ? "used" : "used-too";
  return i < numUsed + numCached ? "cached" : "free";
}

function drawSquare(context, x, y, kind, palette) {
  const size = SQUARE - 2;
  if (kind === "free") {
    context.strokeStyle = palette.line;
    context.lineWidth = 1;
    context.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
    return;
  }
  context.fillStyle = kind === "cached" ? palette.cached : palette.decode;
  if (kind === "used-too") context.globalAlpha = 0.55;
  context.fillRect(x, y, size, size);
  context.globalAlpha = 1;
  if (kind === "cached") {
    context.fillStyle = palette.surface;
    context.fillRect(x + 3, y + 3, size - 6, size - 6);
  }
}
