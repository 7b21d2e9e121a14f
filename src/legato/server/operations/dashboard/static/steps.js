/** What each step holds, and how long it takes, on the time axis of the lanes. */

import { begin, describe, label, line } from "./canvas.js";
import { duration, integer } from "./format.js";
import { Timeline } from "./timeline.js";

const GAP = 14;
const THINNEST = 3; // of a few decodes under a budget of hundreds, to be seen

/** Draw the steps of `state` as of `view` ({endS, windowS}). */
export function drawSteps(canvas, state, view, palette) {
  const { context, width, height } = begin(canvas);
  const time = new Timeline(width, height, view);
  const steps = state.steps.filter((step) => step.endS > time.startS);
  time.drawGrid(context, palette);
  const middle = Math.round(time.bottom * 0.54);
  const tokens = { top: 4, bottom: middle - GAP / 2 };
  const durations = { top: middle + GAP / 2, bottom: time.bottom };
  drawTokens(context, steps, tokens, time, palette);
  drawDurations(context, steps, durations, time, palette);
  describe(canvas, `Composition of the steps, ${stepSummary(state.lastStep)}`);
}

function drawTokens(context, steps, area, time, palette) {
  const most = Math.max(8, ...steps.map((step) => step.numDecode + step.numPrefill),
    ...steps.filter((step) => !step.limitS).map((step) => step.budget));
  const scale = (area.bottom - area.top) / most;
  drawAxis(context, area, "tokens", integer(most), palette);
  time.clipped(context, () => {
    for (const step of steps) {
      const [x, width] = extent(step, time);
      const decode = step.numDecode && Math.max(THINNEST, step.numDecode * scale);
      const prefill = step.numPrefill * scale;
      context.fillStyle = palette.decode;
      context.fillRect(x, area.bottom - decode, width, decode);
      if (prefill) {
        context.fillStyle = palette.hatch(context, palette.edge, palette.prefill);
        context.fillRect(x, area.bottom - decode - prefill, width, prefill);
      }
      const slack = (step.budget - step.numDecode - step.numPrefill) * scale;
      if (!step.limitS && slack > 0) {
        drawSlack(context, x, area.bottom - decode - prefill - slack, width, slack, palette);
      }
    }
  });
}

function drawDurations(context, steps, area, time, palette) {
  const seconds = steps.map((step) => step.endS - step.startS);
  const limits = steps.map((step) => step.limitS ?? 0);
  const most = 1.1 * Math.max(0.01, ...seconds, ...limits);
  const scale = (area.bottom - area.top) / most;
  drawAxis(context, area, "duration", duration(most), palette);
  time.clipped(context, () => {
    steps.forEach((step, i) => {
      const [x, width] = extent(step, time);
      const isLate = step.limitS !== null && seconds[i] > step.limitS;
      const tall = seconds[i] * scale;
      context.fillStyle = isLate ? palette.late : palette.muted;
      context.fillRect(x, area.bottom - tall, width, tall);
      if (step.limitS > seconds[i]) {
        const slack = (step.limitS - seconds[i]) * scale;
        drawSlack(context, x, area.bottom - tall - slack, width, slack, palette);
      }
      if (step.limitS > 0) {
        const y = area.bottom - step.limitS * scale;
        line(context, x, y, x + width, y, palette.text, { width: 1.5 });
      }
    });
  });
}

function drawSlack(context, x, y, width, height, palette) {
  context.fillStyle = palette.slack;
  context.fillRect(x, y, width, height);
}

function drawAxis(context, area, name, most, palette) {
  line(context, 88, area.bottom, 92, area.bottom, palette.line);
  label(context, name, 0, (area.top + area.bottom) / 2, palette.text);
  label(context, most, 86, area.top + 6, palette.muted, "right");
  label(context, "0", 86, area.bottom - 4, palette.muted, "right");
}

/** A step from where it began to be planned to its end, with a hair's breadth to the next. */
function extent(step, time) {
  const x = time.x(step.startS);
  return [x, Math.max(1, time.x(step.endS) - x - 0.5)];
}

/** A step in words. */
export function stepSummary(step) {
  if (!step) return "no step yet";
  const slack = step.limitS
    ? duration(Math.max(0, step.limitS - (step.endS - step.startS)))
    : `${integer(Math.max(0, step.budget - step.numDecode - step.numPrefill))} tokens`;
  return `last: ${step.numDecode} decode + ${integer(step.numPrefill)} prefill, ` +
    `${duration(step.endS - step.startS)}, slack ${slack}`;
}
