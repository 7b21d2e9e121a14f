/** The time axis that lanes and steps share: the last seconds, now at the right. */

import { label, line } from "./canvas.js";

const LEFT = 92;
const NARROW_LEFT = 58;
const NARROW = 500; // the least width with room for all labels
const RIGHT = 10;
const AXIS_HEIGHT = 16;
const LABEL_WIDTH = 44;
const STEPS_S = [0.5, 1, 2, 5, 10];

export class Timeline {
  /** @param {{endS: number, windowS: number}} view */
  constructor(width, height, view) {
    Object.assign(this, view);
    this.isNarrow = width < NARROW;
    this.left = this.isNarrow ? NARROW_LEFT : LEFT;
    this.right = width - RIGHT;
    this.bottom = height - AXIS_HEIGHT;
  }

  get startS() {
    return this.endS - this.windowS;
  }

  x(timeS) {
    return this.right - ((this.endS - timeS) / this.windowS) * (this.right - this.left);
  }

  /** Returns the time drawn at `x`. */
  timeAt(x) {
    return this.endS - ((this.right - x) / (this.right - this.left)) * this.windowS;
  }

  drawGrid(context, palette) {
    const perSecond = (this.right - this.left) / this.windowS;
    const everyS = STEPS_S.find((stepS) => stepS * perSecond >= LABEL_WIDTH) ?? STEPS_S.at(-1);
    for (let agoS = 0; agoS <= this.windowS; agoS += everyS) {
      const x = this.x(this.endS - agoS);
      line(context, x, 0, x, this.bottom, palette.grid);
      const [text, align] = agoS ? [`−${agoS} s`, "center"] : ["now", "right"];
      label(context, text, agoS ? x : x + RIGHT, this.bottom + AXIS_HEIGHT / 2 + 1, palette.muted,
        align);
    }
  }

  /** Draws, clipped to the axis. */
  clipped(context, draw) {
    context.save();
    context.beginPath();
    context.rect(this.left, 0, this.right - this.left, this.bottom);
    context.clip();
    draw();
    context.restore();
  }
}
