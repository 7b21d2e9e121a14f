/** Draws a latency's distribution over a logarithmic axis, with its SLO. */

import { begin, describe, label, line } from "./canvas.js";
import { duration, integer, percent, setting } from "./format.js";
import { quantile } from "./state.js";
import { explain } from "./tooltip.js";

const PER_DECADE = 12;
const SHORTEST_S = 1e-4;
const LEFT = 34;
const BOTTOM = 18;
const TOP = 18;
const LEAST_APART = 11; // pixels between labels of counts
const GAP = 8; // pixels between labels of the axis

/**
 * @param {number[]} seconds
 * @param {number | null} sloS
 * @param {string} name of the latency
 */
export function drawDistribution(canvas, seconds, sloS, name, palette) {
  const { context, width, height } = begin(canvas);
  const { num, late, text } = verdict(seconds, sloS);
  describe(canvas, `${name}: ${text}`);
  if (!num) {
    label(context, "Nothing measured yet", width / 2, height / 2, palette.muted, "center");
    explain(canvas, () => null);
    return;
  }
  const axis = logAxis(seconds, sloS, width);
  const bins = histogram(seconds, sloS);
  const most = Math.max(...bins.map(({ count }) => count));
  const bottom = height - BOTTOM;
  // The square root, so that a few late values among thousands are visible.
  const tall = (count) => Math.sqrt(count / most) * (bottom - TOP);
  drawCounts(context, axis, most, bottom, tall, palette);
  for (const { startS, endS, count, isLate } of bins) {
    const x = axis.x(startS);
    const wide = Math.max(1.5, axis.x(endS) - x - 1);
    const high = Math.max(3, tall(count));
    context.fillStyle = isLate ? palette.hatch(context, palette.surface, palette.late) : palette.decode;
    context.fillRect(x, bottom - high, wide, high);
  }
  drawAxis(context, axis, bottom, palette);
  if (sloS !== null) drawSlo(context, axis, sloS, bottom, palette);
  if (late) label(context, `▲ ${integer(late)} late`, width, TOP + 6, palette.late, "right");
  explain(canvas, (x) => {
    const bin = bins.find(({ startS, endS }) => axis.x(startS) <= x && x < axis.x(endS));
    return bin ? [`${integer(bin.count)} from ${duration(bin.startS)} to ${duration(bin.endS)}` +
      (bin.isLate ? ", late" : "")] : null;
  });
}

/** Describes how many values are late. */
export function verdict(seconds, sloS) {
  const num = seconds.length;
  const late = sloS === null ? 0 : seconds.filter((value) => value > sloS).length;
  if (!num) return { num, late, text: "nothing measured yet" };
  const quantiles = `median ${duration(quantile(seconds, 0.5))}, ` +
    `99th percentile ${duration(quantile(seconds, 0.99))}`;
  if (sloS === null) return { num, late, text: `${quantiles}, nothing promised` };
  const share = late ? `${percent(late / num)} later than` : "all within";
  return { num, late, text: `${quantiles}, ${share} ${setting(sloS)}` };
}

function binStart(bin) {
  return 10 ** (bin / PER_DECADE);
}

/** Returns the bins with values; the SLO cuts its bin in two. */
function histogram(seconds, sloS) {
  const bins = new Map(); // key floor of the scaled logarithm, and whether it is late
  for (const value of seconds) {
    const bin = Math.floor(Math.log10(Math.max(SHORTEST_S, value)) * PER_DECADE);
    const isLate = sloS !== null && value > sloS;
    const key = `${bin} ${isLate}`;
    if (!bins.has(key)) bins.set(key, { ...bounds(bin, isLate, sloS), count: 0, isLate });
    bins.get(key).count += 1;
  }
  return [...bins.values()];
}

function bounds(bin, isLate, sloS) {
  const [startS, endS] = [binStart(bin), binStart(bin + 1)];
  if (sloS === null) return { startS, endS };
  return isLate ? { startS: Math.max(startS, sloS), endS } : { startS, endS: Math.min(endS, sloS) };
}

function logAxis(seconds, sloS, width) {
  const values = sloS === null ? seconds : [...seconds, sloS];
  const low = Math.floor(Math.log10(Math.max(SHORTEST_S, Math.min(...values))) * 2) / 2;
  const high = Math.max(low + 1, Math.ceil(Math.log10(Math.max(...values)) * 2 + 0.01) / 2);
  return {
    low, high, width,
    x: (value) => LEFT + ((Math.log10(value) - low) / (high - low)) * (width - LEFT),
  };
}

/** Labels the heights of counts 1, 10, 100 and so on, and of the largest count. */
function drawCounts(context, axis, most, bottom, tall, palette) {
  label(context, "count", 0, 6, palette.muted);
  let labelledY = -Infinity;
  for (let count = most; count >= 1; count = 10 ** Math.ceil(Math.log10(count) - 1)) {
    const y = bottom - tall(count);
    if (y - labelledY < LEAST_APART || (count < most && bottom - y < LEAST_APART / 2)) continue;
    labelledY = y;
    line(context, LEFT, y, axis.width, y, palette.grid);
    label(context, integer(count), LEFT - 5, y, palette.muted, "right");
  }
}

function drawAxis(context, axis, bottom, palette) {
  line(context, LEFT, bottom + 0.5, axis.width, bottom + 0.5, palette.line);
  let endX = -GAP;
  for (let exponent = Math.floor(axis.low); exponent <= axis.high; exponent += 1) {
    for (const mantissa of [1, 2, 5]) {
      const value = mantissa * 10 ** exponent;
      const x = axis.x(value);
      if (x >= LEFT) line(context, x, bottom, x, bottom + 4, palette.line);
      const half = context.measureText(setting(value)).width / 2;
      if (x - half < endX + GAP || x < LEFT || x + half > axis.width) continue;
      endX = x + half;
      label(context, setting(value), x, bottom + 12, palette.muted, "center");
    }
  }
}

function drawSlo(context, axis, sloS, bottom, palette) {
  const x = axis.x(sloS);
  line(context, x, 4, x, bottom, palette.text, { width: 2, dash: [5, 3] });
  const isRight = x > axis.width - 80;
  const [offset, align] = isRight ? [-5, "right"] : [5, "left"];
  label(context, `SLO ${setting(sloS)}`, x + offset, 8, palette.text, align);
}
