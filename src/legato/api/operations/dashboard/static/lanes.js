/** Draws streams as lanes: a prompt's chunks as blocks, tokens as ticks, late gaps as bars. */

import { begin, describe, label, line } from "./canvas.js";
import { counted, duration, integer, setting } from "./format.js";
import { Timeline } from "./timeline.js";
import { explain } from "./tooltip.js";

const TALLEST = 34;
const LOWEST = 5;
const LABELLED = 11; // the least height of a lane with text
const STALL_S = 0.25; // a gap worth a mark without a promise
const NEAR = 4; // pixels from a tick that count as it
const CLOSE = 4; // ticks nearer than this are thin, so that they can be told apart

/** Draw `state` as of `view` ({endS, windowS}). */
export function drawLanes(canvas, state, view, palette) {
  const { context, width, height } = begin(canvas);
  const time = new Timeline(width, height, view);
  const streams = visible(state, time);
  const rowHeight = Math.max(LOWEST, Math.min(TALLEST, time.bottom / Math.max(1, streams.length)));
  const numRows = Math.min(streams.length, Math.floor(time.bottom / rowHeight));
  const shown = streams.slice(0, numRows);
  const scene = { context, time, palette, lateFromS: lateFrom(state), open: state.runningSteps };
  time.drawGrid(context, palette);
  shown.forEach((stream, row) => {
    const lane = { top: row * rowHeight, height: rowHeight, middle: (row + 0.5) * rowHeight };
    if (rowHeight >= LABELLED) drawName(scene, stream, lane);
    time.clipped(context, () => drawStream(scene, stream, lane));
  });
  if (!streams.length) {
    label(context, "Nothing runs. Start some streams.", width / 2, time.bottom / 2, palette.muted,
      "center");
  }
  const hidden = streams.length - numRows;
  const legend = time.isNarrow ? "out" : "in + out";
  label(context, hidden ? `+ ${hidden} more` : legend, 0, time.bottom + 9, palette.muted);
  describe(canvas, summary(state, scene, shown));
  explain(canvas, (x, y) => {
    const stream = y < time.bottom ? shown[Math.floor(y / rowHeight)] : null;
    return stream && tell(scene, stream, x);
  });
}

/** Returns the longest gap that is not marked. */
export function lateFrom(state) {
  return state.settings?.resolved.itl_slo_s ?? STALL_S;
}

function visible(state, time) {
  return [...state.streams.values()]
    .filter(({ endedS }) => endedS === null || endedS > time.startS)
    .sort((a, b) => a.lane - b.lane);
}

/** Returns the running step that computes a part of the stream's prompt. */
function openStep(stream, { open }) {
  return open.find(({ prefills }) => prefills.has(stream.id));
}

/** Returns how long a stream has waited for its next token, if that is late already. */
function openGap(stream, { time, lateFromS }) {
  if (stream.endedS !== null || stream.lastTokenS === null) return null;
  const gapS = time.endS - stream.lastTokenS;
  return gapS > lateFromS ? gapS : null;
}

function drawName({ context, time, palette }, stream, lane) {
  const colour = stream.endedS === null ? palette.text : palette.muted;
  label(context, name(stream), 0, lane.middle, colour);
  const prompt = stream.numPrompt === null || time.isNarrow ? "" : `${integer(stream.numPrompt)}+`;
  label(context, `${prompt}${stream.numOutput}`, time.left - 8, lane.middle, palette.muted, "right");
}

function name(stream) {
  return `#${stream.id.split("-", 1)[0]}`;
}

function drawStream(scene, stream, lane) {
  const { time } = scene;
  drawWaiting(scene, stream, lane);
  const chunks = stream.chunks.filter((chunk) => chunk.endS > time.startS);
  drawLife(scene, chunks, stream, lane);
  for (const { gapS, endS } of chunks) {
    if (gapS !== null && gapS > scene.lateFromS) drawGap(scene, endS - gapS, endS, lane);
  }
  for (const chunk of chunks) {
    if (!chunk.isDecode) drawChunk(scene, chunk.startS, chunk.endS, chunk.numTokens, lane);
  }
  drawTokens(scene, chunks.filter((chunk) => chunk.numCame), lane);
  if (openGap(stream, scene) !== null) drawGap(scene, stream.lastTokenS, time.endS, lane);
  const open = openStep(stream, scene);
  if (open) drawChunk(scene, open.startS, time.endS, open.prefills.get(stream.id), lane);
}

function drawWaiting(scene, stream, lane) {
  const { context, time, palette } = scene;
  if (stream.numPrompt === null) return;
  const begunS = openStep(stream, scene)?.startS ?? time.endS;
  const untilS = stream.chunks[0]?.startS ?? stream.endedS ?? begunS;
  line(context, time.x(stream.arrivedS), lane.middle, time.x(untilS), lane.middle, palette.muted,
    { width: 2, dash: [2, 3] });
}

function drawLife({ context, time, palette }, chunks, stream, lane) {
  const first = chunks.find((chunk) => chunk.numCame);
  if (!first && stream.lastTokenS === null) return;
  const startS = first?.endS ?? stream.lastTokenS;
  const endS = stream.endedS ?? time.endS;
  line(context, time.x(startS), lane.middle, time.x(endS), lane.middle, palette.line);
}

function drawTokens({ context, time, palette }, tokens, lane) {
  context.fillStyle = palette.decode;
  let lastX = -Infinity;
  for (const token of tokens) {
    const x = time.x(token.endS);
    const tall = lane.height * (token.gapS === null ? 0.9 : 0.62);
    context.fillRect(x - 1, lane.middle - tall / 2, x - lastX < CLOSE ? 1 : 2, tall);
    lastX = x;
  }
}

function drawChunk({ context, time, palette }, startS, endS, numTokens, lane) {
  const x = time.x(startS);
  const width = Math.max(2, time.x(endS) - x - 1);
  const tall = Math.max(3, lane.height - 4);
  const top = lane.middle - tall / 2;
  context.fillStyle = palette.hatch(context, palette.edge, palette.prefill);
  context.fillRect(x, top, width, tall);
  context.strokeStyle = palette.edge;
  context.lineWidth = 1;
  context.strokeRect(x + 0.5, top + 0.5, width - 1, tall - 1);
  const seen = [Math.max(x, time.left), x + width];
  drawInside({ context, palette }, integer(numTokens), seen, lane, palette.text);
}

function drawGap(scene, startS, endS, lane) {
  const { context, time, palette } = scene;
  const [from, to] = [time.x(startS), time.x(endS)];
  line(context, from, lane.middle, to, lane.middle, palette.late, { width: 3 });
  const seen = [Math.max(from, time.left), to];
  drawInside(scene, duration(endS - startS), seen, lane, palette.late);
}

/** Draws text in the middle of a span, if it is wide enough. */
function drawInside({ context, palette }, text, [from, to], lane, colour) {
  const textWidth = context.measureText(text).width + 8;
  if (lane.height < LABELLED || to - from < textWidth + 8) return;
  context.fillStyle = palette.surface;
  context.fillRect((from + to - textWidth) / 2, lane.middle - 7, textWidth, 14);
  label(context, text, (from + to) / 2, lane.middle + 0.5, colour, "center");
}

/** Describes the item at a place of a stream's lane. */
function tell(scene, stream, x) {
  const { time } = scene;
  const prompt = stream.numPrompt === null ? "" : `, prompt of ${counted(stream.numPrompt, "token")}`;
  const head = `${name(stream)}: ${counted(stream.numOutput, "token")} of output${prompt}`;
  if (x < time.left) return [head, `${stream.phase}, ${stream.id}`];
  const atS = time.timeAt(x);
  const nearS = atS - time.timeAt(x - NEAR);
  const inside = stream.chunks.find((chunk) =>
    !chunk.isDecode && chunk.startS <= atS && atS <= chunk.endS);
  if (inside) {
    const took = duration(inside.endS - inside.startS);
    return [head, `a chunk of ${counted(inside.numTokens, "token")}, ${took}`];
  }
  const open = openStep(stream, scene);
  if (open && atS >= open.startS) {
    const since = duration(time.endS - open.startS);
    return [head, `a chunk of ${counted(open.prefills.get(stream.id), "token")}, for ${since} now`];
  }
  const token = stream.chunks.find((chunk) => chunk.numCame && Math.abs(chunk.endS - atS) <= nearS)
    ?? stream.chunks.find((chunk) => chunk.numCame && chunk.endS > atS && chunk.gapS !== null);
  if (token) {
    const gap = token.gapS === null ? "the first here" : `${duration(token.gapS)} after the one before`;
    return [head, `${token.numCame > 1 ? `${token.numCame} tokens at once` : "a token"}, ${gap}`];
  }
  if (openGap(stream, scene) !== null) {
    return [head, `waits for its next token for ${duration(time.endS - stream.lastTokenS)} now`];
  }
  return [head, stream.phase];
}

function summary(state, scene, shown) {
  const count = { waiting: 0, prefill: 0, decode: 0 };
  for (const stream of state.live) count[stream.phase] += 1;
  const stalled = shown.filter((stream) => openGap(stream, scene) !== null).length;
  const stopped = stalled
    ? `; ${stalled} without a token for more than ${setting(scene.lateFromS)}` : "";
  return `Lanes of the running streams: ${count.decode} decoding, ${count.prefill} in prefill, ` +
    `${count.waiting} waiting${stopped}`;
}
