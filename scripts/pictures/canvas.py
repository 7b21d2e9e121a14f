"""Boxes, arrows and words as SVG."""

from collections.abc import Sequence
from typing import Literal
from xml.sax.saxutils import escape

Anchor = Literal["start", "middle", "end"]

_LINE = 17
_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.strong { font-weight: 600 }
.faint { fill: #59636e }
.box { fill: #f6f8fa; stroke: #59636e }
.chosen { fill: #ddf4e4; stroke: #1a7f37; stroke-width: 2 }
.line { fill: none; stroke: #59636e; stroke-width: 1.5 }
.way { fill: none; stroke: #1a7f37; stroke-width: 2.5 }
.lane { stroke: #d1d9e0 }
.head { fill: #59636e }
.goal { fill: #1a7f37 }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc }
  .faint { fill: #9198a1 }
  .box { fill: #151b23; stroke: #9198a1 }
  .chosen { fill: #12261e; stroke: #3fb950 }
  .line { stroke: #9198a1 }
  .way { stroke: #3fb950 }
  .lane { stroke: #3d444d }
  .head { fill: #9198a1 }
  .goal { fill: #3fb950 }
}
"""
_HEADS = "".join(
    f'<marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="9" markerHeight="9" '
    f'markerUnits="userSpaceOnUse" orient="auto-start-reverse">'
    f'<path d="M0 0 10 5 0 10z" class="{name}"/></marker>'
    for name in ("head", "goal")
)


class Canvas:
    """What is drawn on it, in its order; all lengths are in pixels.

    Args:
        told: what the picture shows, for those who do not see it.
    """

    def __init__(self, width: int, height: int, told: str) -> None:
        self._width, self._height, self._told = width, height, told
        self._parts: list[str] = []

    def text(
        self, x: float, y: float, words: str, kind: str = "", anchor: Anchor = "middle"
    ) -> None:
        """One line, `y` being its base."""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{kind}">'
            f"{escape(words)}</text>"
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        lines: Sequence[str],
        *,
        is_chosen: bool = False,
    ) -> None:
        """Draw a box with lines in its middle. The first is its name."""
        kind = "chosen" if is_chosen else "box"
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" '
            f'class="{kind}"/>'
        )
        top = y + height / 2 - (len(lines) - 1) * _LINE / 2 + 4.5
        for i, line in enumerate(lines):
            self.text(x + width / 2, top + i * _LINE, line, "faint" if i else "strong")

    def arrow(
        self, points: Sequence[tuple[float, float]], words: str = "", *, is_way: bool = False
    ) -> None:
        """Through points, with words above the middle of the first two."""
        kind, head = ("way", "goal") if is_way else ("line", "head")
        path = " ".join(f"{x:g} {y:g}" for x, y in points)
        self._parts.append(f'<path d="M{path}" class="{kind}" marker-end="url(#{head})"/>')
        (x1, y1), (x2, y2) = points[:2]
        if words:
            self.text((x1 + x2) / 2, (y1 + y2) / 2 - 6, words)

    def lane(self, x: float, top: float, bottom: float) -> None:
        """A vertical line, along which time goes."""
        self._parts.append(f'<path d="M{x:g} {top:g} {x:g} {bottom:g}" class="lane"/>')

    def svg(self) -> str:
        size = f'viewBox="0 0 {self._width} {self._height}" width="{self._width}"'
        parts = "\n".join(self._parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n'
            f"<title>{escape(self._told)}</title>\n<style>{_STYLE}</style>\n"
            f"<defs>{_HEADS}</defs>\n{parts}\n</svg>\n"
        )
