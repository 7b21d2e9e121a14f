/* From now on, keeps where each canvas's last drawing has its labels; `collisions` returns those that
   overlap on one line. */
() => {
  const drawn = new Map();
  const { clearRect, fillText } = CanvasRenderingContext2D.prototype;
  CanvasRenderingContext2D.prototype.clearRect = function (...area) {
    drawn.set(this.canvas, []);
    return clearRect.apply(this, area);
  };
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y, ...rest) {
    const wide = this.measureText(text).width;
    const left = x - wide * ({ center: 0.5, right: 1, end: 1 }[this.textAlign] ?? 0);
    drawn.get(this.canvas)?.push({ text, left, right: left + wide, y });
    return fillText.call(this, text, x, y, ...rest);
  };
  window.collisions = () => [...drawn].flatMap(([canvas, labels]) => labels.flatMap((one, i) =>
    labels.slice(i + 1)
      .filter((other) => Math.abs(one.y - other.y) < 9 && one.left < other.right + 2 &&
        other.left < one.right + 2)
      .map((other) => `${canvas.id}: "${one.text}" and "${other.text}"`)));
};
