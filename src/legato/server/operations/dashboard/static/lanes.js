/** Streams as lanes: a prompt's chunks as blocks, tokens as ticks, what came late as a bar. */

import { begin, describe, label, line } from "./canvas.js";
import { duration, integer } from "./format.js";
import { Timeline } from "./timeline.js";

const TALLEST = 26;
const LOWEST = 5;
const LABELLED = 11; // the least height of a lane with text
const STALL_S = 0.25; // a gap worth a mark where nothing is promised

/** Draw `state` as of `view` ({endS, windowS}). */
export function drawLanes(canvas, state, view, palette) {
  const { context, width, height } = begin(canvas);
  const time = new Timeline(width, height, view);
  const streams = visible(state, time);
  const rowHeight = Math.max(LOWEST, Math.min(TALLEST, time.bottom / Math.max(1, streams.length)));
  const numRows = Math.min(streams.length, Math.floor(time.bottom / rowHeight));
  time.drawGrid(context, palette);
  streams.slice(0, numRows).forEach((stream, row) => {
    const lane = { top: row * rowHeight, height: rowHeight, middle: (row + 0.5) * rowHeight };
    if (rowHeight >= LABELLED) drawName(context, stream, lane, palette);
    time.clipped(context, () => drawStream(context, stream, lane, time, lateFrom(state), palette));
  });
  if (!streams.length) {
    label(context, "Nothing runs. Start some streams at the right.", width / 2, time.bottom / 2,
      palette.muted, "center");
  }
  const hidden = streams.length - numRows;
  label(context, hidden ? `+ ${hidden} more` : "in + out", 0, time.bottom + 9, palette.muted);
  describe(canvas, summary(state));
}

/** How long a gap may be before it is marked. */
export function lateFrom(state) {
  return state.settings?.resolved.itl_slo_s ?? STALL_S;
}

function visible(state, time) {
  return [...state.streams.values()]
    .filter(({ endedS }) => endedS === null || endedS > time.startS)
    .sort((a, b) => a.lane - b.lane);
}

function drawName(context, stream, lane, palette) {
  const colour = stream.endedS === null ? palette.text : palette.muted;
  const number = stream.id.split("-", 1)[0];
  label(context, `#${number}`, 0, lane.middle, colour);
  const prompt = stream.numPrompt === null ? "" : `${integer(stream.numPrompt)}+`;
  label(context, `${prompt}${stream.numOutput}`, 84, lane.middle, palette.muted, "right");
}

function drawStream(context, stream, lane, time, lateFromS, palette) {
  drawWaiting(context, stream, lane, time, palette);
  const chunks = stream.chunks.filter((chunk) => chunk.endS > time.startS);
  drawLife(context, chunks, stream, lane, time, palette);
  for (const chunk of chunks) {
    if (chunk.gapS !== null && chunk.gapS > lateFromS) drawGap(context, chunk, lane, time, palette);
  }
  for (const chunk of chunks) {
    if (!chunk.isDecode) drawChunk(context, chunk, lane, time, palette);
  }
  context.fillStyle = palette.decode;
  for (const chunk of chunks) {
    if (chunk.samples) {
      const tall = lane.height * (chunk.gapS === null ? 0.9 : 0.62);
      context.fillRect(time.x(chunk.endS) - 1, lane.middle - tall / 2, 2, tall);
    }
  }
}

function drawWaiting(context, stream, lane, time, palette) {
  if (stream.numPrompt === null) return;
  const untilS = stream.chunks[0]?.startS ?? stream.endedS ?? time.endS;
  line(context, time.x(stream.arrivedS), lane.middle, time.x(untilS), lane.middle, palette.muted,
    { dash: [2, 3] });
}

function drawLife(context, chunks, stream, lane, time, palette) {
  const tokens = chunks.filter((chunk) => chunk.samples);
  if (!tokens.length) return;
  const endS = stream.endedS ?? time.endS;
  line(context, time.x(tokens[0].endS), lane.middle, time.x(endS), lane.middle, palette.line);
}

function drawChunk(context, chunk, lane, time, palette) {
  const x = time.x(chunk.startS);
  const width = Math.max(2, time.x(chunk.endS) - x - 1);
  const tall = Math.max(3, lane.height - 4);
  const top = lane.middle - tall / 2;
  context.fillStyle = palette.hatch(context, palette.edge, palette.prefill);
  context.fillRect(x, top, width, tall);
  context.strokeStyle = palette.edge;
  context.lineWidth = 1;
  context.strokeRect(x + 0.5, top + 0.5, width - 1, tall - 1);
  const text = integer(chunk.numTokens);
  const textWidth = context.measureText(text).width + 6;
  if (lane.height >= LABELLED && width > textWidth + 16) {
    context.fillStyle = palette.surface;
    context.fillRect(x + width / 2 - textWidth / 2, lane.middle - 7, textWidth, 14);
    label(context, text, x + width / 2, lane.middle + 0.5, palette.text, "center");
  }
}

function drawGap(context, chunk, lane, time, palette) {
  const [from, to] = [time.x(chunk.endS - chunk.gapS), time.x(chunk.endS)];
  line(context, from, lane.middle, to, lane.middle, palette.late, { width: 3 });
  const text = duration(chunk.gapS);
  const textWidth = context.measureText(text).width + 8;
  if (lane.height >= LABELLED && to - from > textWidth + 6) {
    context.fillStyle = palette.surface;
    context.fillRect((from + to - textWidth) / 2, lane.middle - 7, textWidth, 14);
    label(context, text, (from + to) / 2, lane.middle + 0.5, palette.late, "center");
  }
}

function summary(state) {
  const count = { waiting: 0, prefill: 0, decode: 0 };
  for (const stream of state.live) count[stream.phase] += 1;
  return `Lanes of the running streams: ${count.decode} decoding, ${count.prefill} in prefill, ` +
    `${count.waiting} waiting`;
}
