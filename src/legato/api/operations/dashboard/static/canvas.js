/** Helpers for all drawings: sharp canvases, the page's colours, hatching. */

const COLOURS = ["text", "muted", "line", "grid", "surface", "decode", "prefill", "edge", "late",
  "cached", "slack"];

/** Colours of the style sheet, by name; read again when the scheme changes. */
export class Palette {
  constructor() {
    this.#read();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#read());
  }

  #read() {
    const style = getComputedStyle(document.documentElement);
    for (const name of COLOURS) this[name] = style.getPropertyValue(`--${name}`).trim();
    this.hatches = new Map();
  }

  /** A pattern of diagonal lines, so that areas differ by more than their colour. */
  hatch(context, colour, background) {
    const key = `${colour}/${background}`;
    if (!this.hatches.has(key)) this.hatches.set(key, hatch(context, colour, background));
    return this.hatches.get(key);
  }
}

function hatch(context, colour, background) {
  const size = 6;
  const tile = new OffscreenCanvas(size, size);
  const pen = tile.getContext("2d");
  if (background) {
    pen.fillStyle = background;
    pen.fillRect(0, 0, size, size);
  }
  pen.strokeStyle = colour;
  pen.lineWidth = 1.4;
  pen.beginPath();
  for (const x of [-size, 0, size]) {
    pen.moveTo(x, size);
    pen.lineTo(x + size, 0);
  }
  pen.stroke();
  return context.createPattern(tile, "repeat");
}

/** The context of an empty canvas, in CSS pixels, and its size. */
export function begin(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas;
  const scale = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  return { context, width, height };
}

/** Text in one colour; `align` as in the canvas API. */
export function label(context, text, x, y, colour, align = "left") {
  context.fillStyle = colour;
  context.textAlign = align;
  context.fillText(text, x, y);
}

/** Draws a straight line, dashed if `dash` is given. */
export function line(context, x1, y1, x2, y2, colour, { width = 1, dash = [] } = {}) {
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.setLineDash(dash);
  context.beginPath();
  context.moveTo(x1, y1);
  context.lineTo(x2, y2);
  context.stroke();
  context.setLineDash([]);
}

/** Returns the next round number: 1, 1.5, 2, 3, 5 or 8 and zeros, so that little room is lost. */
export function niceTop(most) {
  const decade = 10 ** Math.floor(Math.log10(most));
  return [1, 1.5, 2, 3, 5, 8, 10].find((mantissa) => mantissa * decade >= most * 0.999) * decade;
}

/**
 * A vertical axis left of a timeline's plot: its name, and 0, the middle and the top.
 *
 * @param {{name: string, text: (value: number) => string}} unit
 */
export function drawScale(context, time, area, top, { name, text }, palette) {
  for (const share of [0, 0.5, 1]) {
    const y = area.bottom - share * (area.bottom - area.top);
    line(context, time.left, y, time.right, y, share ? palette.grid : palette.line);
    if (time.isNarrow && share === 0.5) continue;
    label(context, text(share * top), time.left - 5, y, palette.muted, "right");
  }
  const y = time.isNarrow ? (area.top + area.bottom) / 2 : area.top;
  label(context, name, 0, y, palette.text);
}

/** Describes a drawing for screen readers. */
export function describe(canvas, text) {
  if (canvas.getAttribute("aria-label") !== text) canvas.setAttribute("aria-label", text);
}
