/** Two pastes of a long prompt side by side: the tokens of eight streams, on the same axis. */

import { begin, describe, label, line } from "./canvas.js";
import { duration } from "./format.js";

const BEFORE_S = 0.5;
const AFTER_S = 0.5;
const BOTTOM = 16;

/** @param {{tokens: object[], pastedS: number, firstTokenS: number, gapS: number}} paste */
export function drawPaste(canvas, paste, windowS, palette) {
  const { context, width, height } = begin(canvas);
  const bottom = height - BOTTOM;
  const x = (atS) => ((atS - paste.pastedS + BEFORE_S) / windowS) * width;
  const numLanes = 1 + Math.max(...paste.tokens.map(({ lane }) => lane));
  const laneHeight = bottom / numLanes;
  context.fillStyle = palette.slack;
  context.fillRect(x(paste.pastedS), 0, x(paste.firstTokenS) - x(paste.pastedS), bottom);
  context.fillStyle = palette.decode;
  for (const { lane, atS } of paste.tokens) {
    if (x(atS) < 0 || x(atS) > width) continue;
    context.fillRect(x(atS) - 0.75, lane * laneHeight + 1, 1.5, laneHeight - 2);
  }
  for (const atS of [paste.pastedS, paste.firstTokenS]) {
    line(context, x(atS), 0, x(atS), bottom, palette.prefill, { width: 2 });
  }
  label(context, "sent", x(paste.pastedS), bottom + 9, palette.muted, "center");
  const end = Math.min(x(paste.firstTokenS), width - 56);
  const after = `after ${duration(paste.ttftS)}`;
  label(context, after, Math.max(end, 80), bottom + 9, palette.muted, "center");
  describe(canvas, `The streams stood still for ${duration(paste.gapS)} at most; the prompt's first ` +
    `token came after ${duration(paste.ttftS)}`);
}

/** Seconds that both pastes are drawn over. */
export function commonWindow(...pastes) {
  return BEFORE_S + AFTER_S + Math.max(...pastes.map(({ ttftS }) => ttftS));
}
