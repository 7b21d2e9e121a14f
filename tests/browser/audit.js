/* What people cannot use or read on a page: {unnamed: controls without a name, faint: texts with a
   contrast below WCAG's 4.5 to what lies behind them}. */
() => {
  const isShown = (node) => node.checkVisibility({ visibilityProperty: true });
  const name = (node) => [
    node.getAttribute("aria-label"),
    ...[...(node.labels ?? [])].map((label) => label.textContent),
    node.matches("button, summary, a") ? node.textContent : "",
  ].join("").trim();

  const rgba = (colour) => {
    const [r, g, b, a = 1] = colour.match(/[\d.]+/g).map(Number);
    return { r, g, b, a };
  };
  const luminance = ({ r, g, b }) => {
    const [lr, lg, lb] = [r, g, b].map((c) => {
      const s = c / 255;
      return s <= 0.04045 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * lr + 0.7152 * lg + 0.0722 * lb;
  };
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = rgba(getComputedStyle(at).backgroundColor);
      if (colour.a === 1) return colour;
    }
    return { r: 255, g: 255, b: 255 };
  };
  const contrast = (node, colour) => {
    const [low, high] = [luminance(rgba(colour)), luminance(behind(node))].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };

  const faint = [];
  const check = (node, what, colour) => {
    const found = contrast(node, colour);
    if (found < 4.5) faint.push(`${what}: ${found.toFixed(2)}`);
  };
  for (const node of document.querySelectorAll("body *")) {
    const ownText = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (isShown(node) && (ownText || node.matches("input:not([type=checkbox]), select"))) {
      check(node, `${node.tagName} ${node.id || node.className} "${node.textContent.trim()}"`,
        getComputedStyle(node).color);
    }
  }
  // What is written on canvases.
  const style = getComputedStyle(document.documentElement);
  const probe = document.createElement("i");
  document.querySelector(".card").append(probe);
  for (const colour of ["--text", "--muted", "--late"]) {
    probe.style.color = style.getPropertyValue(colour);
    check(probe, colour, getComputedStyle(probe).color);
  }
  probe.remove();

  const controls = [...document.querySelectorAll("button, input, select, summary, [role=img]")];
  return { unnamed: controls.filter((node) => !name(node)).map((node) => node.outerHTML), faint };
}
