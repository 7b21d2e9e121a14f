/** Describes the item under the pointer, beside it. */

const OFFSET = 12;

/** Functions that describe a point of a canvas, in CSS pixels: lines of text, or null. */
const tellers = new Map(); // key canvas
let shown = null; // {canvas, x, y}

const box = document.createElement("div");
box.className = "tooltip";
box.setAttribute("role", "tooltip");
box.hidden = true;
document.body.append(box);

/**
 * Sets the function that describes a drawing's points.
 *
 * @param {(x: number, y: number) => string[] | null} tell
 */
export function explain(canvas, tell) {
  if (!tellers.has(canvas)) watch(canvas);
  tellers.set(canvas, tell);
  if (shown?.canvas === canvas) show();
}

function watch(canvas) {
  const point = (event) => {
    const { left, top } = canvas.getBoundingClientRect();
    shown = { canvas, x: event.clientX - left, y: event.clientY - top };
    show();
  };
  canvas.addEventListener("pointermove", point);
  canvas.addEventListener("pointerdown", point);
  canvas.addEventListener("pointerleave", hide);
}

function hide() {
  shown = null;
  box.hidden = true;
}

function show() {
  const lines = tellers.get(shown.canvas)(shown.x, shown.y);
  box.hidden = !lines;
  if (!lines) return;
  box.textContent = lines.join("\n");
  const { left, top } = shown.canvas.getBoundingClientRect();
  const [x, y] = [left + shown.x, top + shown.y];
  const isRight = x + OFFSET + box.offsetWidth > document.documentElement.clientWidth;
  box.style.left = `${Math.max(4, isRight ? x - OFFSET - box.offsetWidth : x + OFFSET)}px`;
  const isLow = y + OFFSET + box.offsetHeight > innerHeight;
  box.style.top = `${isLow ? y - OFFSET - box.offsetHeight : y + OFFSET}px`;
}

addEventListener("scroll", hide, { passive: true });
addEventListener("keydown", (event) => event.key === "Escape" && hide());
