/** Draws each step's contents and duration, on the time axis of the lanes. */

import { begin, describe, drawScale, label, line, niceTop } from "./canvas.js";
import { counted, duration, integer, setting } from "./format.js";
import { Timeline } from "./timeline.js";
import { explain } from "./tooltip.js";

const GAP = 16;
const THINNEST = 3; // so that a few decodes are visible under a budget of hundreds
const TOLD_AFTER_S = 0.25; // a step that runs longer is shown in words
const NAME_LENGTH = 10; // of a replica's id

/** Draws the steps of `state` as of `view` ({endS, windowS}), in a lane for each replica. */
export function drawSteps(canvas, state, view, palette) {
  const { context, width, height } = begin(canvas);
  const time = new Timeline(width, height, view);
  const steps = state.steps.filter((step) => step.endS > time.startS);
  for (const running of state.runningSteps) {
    steps.push({ ...running, endS: Math.max(running.startS, time.endS), isOpen: true });
  }
  time.drawGrid(context, palette);
  const scene = { context, steps, time, palette };
  if (state.replicas.length) drawReplicas(scene, state.replicas);
  else drawEngine(scene);
  const of = state.replicas.length ? ` of ${counted(state.replicas.length, "replica")}` : "";
  describe(canvas, `Composition of the steps${of}, ${stepSummary(state, time.endS)}`);
  explain(canvas, (x, y) => {
    const atS = time.timeAt(x);
    const replica = state.replicas[Math.floor((y / time.bottom) * state.replicas.length)];
    const step = x < time.left ? null : steps.findLast((one) =>
      one.startS <= atS && atS <= one.endS && (replica ?? one.replica) === one.replica);
    return step ? tell(step) : null;
  });
}

function drawEngine(scene) {
  const { time } = scene;
  const middle = Math.round(time.bottom * 0.52);
  drawTokens(scene, { top: 8, bottom: middle - GAP / 2 });
  drawDurations(scene, { top: middle + GAP / 2, bottom: time.bottom - 1 });
}

/** Draws steps as high as their tokens, decodes below; late steps are underlined. */
function drawReplicas({ context, steps, time, palette }, replicas) {
  const most = Math.max(8, ...steps.map(numTokens));
  const height = time.bottom / replicas.length;
  replicas.forEach((replica, row) => {
    const bottom = (row + 1) * height - 1;
    const scale = (height - 4) / most;
    label(context, replica.slice(-NAME_LENGTH), 0, bottom - height / 2, palette.text);
    line(context, time.left, bottom, time.right, bottom, palette.line);
    time.clipped(context, () => {
      for (const step of steps.filter((one) => one.replica === replica)) {
        const [x, width] = drawContent({ context, time, palette }, step, bottom, scale);
        if (isLate(step)) line(context, x, bottom, x + width, bottom, palette.late, { width: 3 });
      }
    });
  });
}

/**
 * Draws a step's tokens: decodes below, then accepted and rejected drafts, prefill above. Returns
 * its position, width and height.
 */
function drawContent({ context, time, palette }, step, bottom, scale) {
  const [x, width] = extent(step, time);
  const { numDecode, numDrafts, numAccepted, numPrefill } = step;
  const parts = [
    [numDecode && Math.max(THINNEST, numDecode * scale), palette.decode],
    [numAccepted * scale, palette.hatch(context, palette.surface, palette.decode)],
    [(numDrafts - numAccepted) * scale, palette.hatch(context, palette.decode, palette.surface)],
    [numPrefill * scale, palette.hatch(context, palette.edge, palette.prefill)],
  ];
  let tall = 0;
  for (const [height, fill] of parts.filter(([height]) => height)) {
    tall += height;
    context.fillStyle = fill;
    context.fillRect(x, bottom - tall, width, height);
  }
  return [x, width, tall];
}

function numTokens(step) {
  return step.numDecode + step.numDrafts + step.numPrefill;
}

/** Describes a step's contents. */
function content(step) {
  const { numDecode, numDrafts, numAccepted, numPrefill } = step;
  const drafts = numDrafts ? ` + ${counted(numDrafts, "draft")} (${integer(numAccepted)} right)` : "";
  return `${integer(numDecode)} decode + ${integer(numPrefill)} prefill${drafts}`;
}

function isLate(step) {
  return step.limitS !== null && step.endS - step.startS > step.limitS;
}

function drawTokens({ context, steps, time, palette }, area) {
  const top = niceTop(Math.max(8, ...steps.map(numTokens),
    ...steps.filter((step) => !step.limitS).map((step) => step.budget)));
  const scale = (area.bottom - area.top) / top;
  drawScale(context, time, area, top, { name: "tokens", text: integer }, palette);
  time.clipped(context, () => {
    for (const step of steps) {
      const [x, width, tall] = drawContent({ context, time, palette }, step, area.bottom, scale);
      const slack = (step.budget - numTokens(step)) * scale;
      if (!step.limitS && slack > 0) {
        drawSlack(context, x, area.bottom - tall - slack, width, slack, palette);
      }
    }
  });
}

function drawDurations({ context, steps, time, palette }, area) {
  const seconds = steps.map((step) => step.endS - step.startS);
  const limits = steps.map((step) => step.limitS ?? 0);
  const predicted = steps.map((step) => (step.isOpen && step.predictedS) || 0);
  const top = niceTop(1000 * Math.max(0.01, ...seconds, ...limits, ...predicted)) / 1000;
  const scale = (area.bottom - area.top) / top;
  drawScale(context, time, area, top, { name: "time", text: setting }, palette);
  time.clipped(context, () => {
    steps.forEach((step, i) => {
      const [x, width] = extent(step, time);
      const tall = seconds[i] * scale;
      context.fillStyle = isLate(step) ? palette.late : palette.muted;
      context.fillRect(x, area.bottom - tall, width, tall);
      if (step.limitS > seconds[i]) {
        const slack = (step.limitS - seconds[i]) * scale;
        drawSlack(context, x, area.bottom - tall - slack, width, slack, palette);
      }
      if (step.limitS > 0) {
        const y = area.bottom - step.limitS * scale;
        line(context, x, y, x + width, y, palette.text, { width: 1.5 });
      }
      if (predicted[i]) {
        const y = area.bottom - predicted[i] * scale;
        line(context, x, y, x + width, y, palette.decode, { width: 2, dash: [4, 3] });
      }
    });
  });
}

function drawSlack(context, x, y, width, height, palette) {
  context.fillStyle = palette.slack;
  context.fillRect(x, y, width, height);
}

/** Returns a step's extent, from its planning to its end, with a thin gap to the next. */
function extent(step, time) {
  const x = time.x(step.startS);
  return [x, Math.max(1, time.x(step.endS) - x - 0.5)];
}

function tell(step) {
  const took = duration(step.endS - step.startS);
  const predicted = step.predictedS ? `, predicted ${duration(step.predictedS)}` : "";
  const most = step.limitS ? `, may take ${duration(step.limitS)}` : "";
  return [
    `${content(step)} of ${counted(step.budget, "token")} at most`,
    `${step.isOpen ? "runs since" : "took"} ${took}${predicted}${most}`,
  ];
}

/** Describes the latest step, or the running one if it takes long. */
export function stepSummary(state, nowS) {
  const running = runningSummary(state, nowS);
  if (running) return running;
  const step = state.lastStep;
  if (!step) return "no step yet";
  const slack = step.limitS
    ? duration(Math.max(0, step.limitS - (step.endS - step.startS)))
    : counted(Math.max(0, step.budget - numTokens(step)), "token");
  return `last: ${content(step)}, ${duration(step.endS - step.startS)}, slack ${slack}`;
}

/** Describes what delays all streams at the moment; null if nothing does for long. */
export function runningSummary(state, nowS) {
  const step = state.runningStep;
  if (step) {
    const sinceS = nowS - step.startS;
    if (sinceS < TOLD_AFTER_S) return null;
    const predicted = step.predictedS ? `, predicted ${duration(step.predictedS)}` : "";
    const came = state.live.filter(({ arrivedS }) => arrivedS > step.startS).length;
    const arrived = came ? `; ${counted(came, "request")} came meanwhile` : "";
    return `a step of ${counted(numTokens(step), "token")} runs since ` +
      `${duration(sinceS)}${predicted}${arrived}`;
  }
  const silentS = nowS - (state.lastStep?.endS ?? nowS);
  const isBusy = state.stats?.num_running > 0;
  return isBusy && silentS > 1 ? `no step has ended since ${duration(silentS)}` : null;
}
