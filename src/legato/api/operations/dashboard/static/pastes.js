/** Draws pastes of a long prompt below each other: the tokens of eight streams, on one axis. */

import { begin, describe, label, line } from "./canvas.js";
import { duration, setting } from "./format.js";
import { explain } from "./tooltip.js";

const BEFORE_S = 0.5;
const AFTER_S = 0.5;
const BOTTOM = 16;
const LABEL_WIDTH = 44;
const STEPS_S = [0.2, 0.5, 1, 2, 5, 10, 20, 50, 100];

/** @param {{tokens: object[], pastedS: number, firstTokenS: number, gapS: number}} paste */
export function drawPaste(canvas, paste, windowS, palette) {
  const { context, width, height } = begin(canvas);
  const bottom = height - BOTTOM;
  const x = (atS) => ((atS - paste.pastedS + BEFORE_S) / windowS) * width;
  const numLanes = 1 + Math.max(...paste.tokens.map(({ lane }) => lane));
  const laneHeight = bottom / numLanes;
  const [sent, first] = [x(paste.pastedS), x(paste.firstTokenS)];
  context.fillStyle = palette.slack;
  context.fillRect(sent, 0, first - sent, bottom);
  context.fillStyle = palette.decode;
  for (const { lane, atS } of paste.tokens) {
    if (x(atS) < 0 || x(atS) > width) continue;
    context.fillRect(x(atS) - 0.75, lane * laneHeight + 1, 1.5, laneHeight - 2);
  }
  for (const at of [sent, first]) line(context, at, 0, at, bottom, palette.prefill, { width: 2 });
  drawAxis(context, { x, pastedS: paste.pastedS, windowS, width, bottom }, palette);
  describe(canvas, `The streams stood still for ${duration(paste.gapS)} at most; the prompt's first ` +
    `token came after ${duration(paste.ttftS)}`);
  explain(canvas, () => [`shaded: from the prompt to its first token, ${duration(paste.ttftS)}`,
    `longest gap of a stream: ${duration(paste.gapS)}`]);
}

/** Draws an axis of seconds since the prompt was sent. */
function drawAxis(context, { x, pastedS, windowS, width, bottom }, palette) {
  line(context, 0, bottom + 0.5, width, bottom + 0.5, palette.line);
  const everyS = STEPS_S.find((stepS) => (stepS / windowS) * width >= LABEL_WIDTH) ?? STEPS_S.at(-1);
  for (let afterS = 0; afterS <= windowS - BEFORE_S; afterS += everyS) {
    const at = x(pastedS + afterS);
    line(context, at, bottom, at, bottom + 4, palette.line);
    const text = afterS ? setting(afterS) : "sent";
    const half = context.measureText(text).width / 2;
    const within = Math.min(Math.max(at, half), width - half);
    label(context, text, within, bottom + 10, palette.muted, "center");
  }
}

/** Returns the seconds that each paste's drawing spans. */
export function commonWindow(pastes) {
  return BEFORE_S + AFTER_S + Math.max(...pastes.map(({ ttftS }) => ttftS));
}
