"""What a step holds where streams have drafts, and what comes of it."""

from scripts.pictures.canvas import Canvas

_LEFT, _CELL, _HEIGHT, _ROW = 120, 74, 30, 62
_OUT = _LEFT + 5 * _CELL + 70


def speculation() -> str:
    """SVG: rows of three requests on the left, what clients get of them on the right."""
    canvas = Canvas(
        860,
        272,
        "A step holds a stream's token with three drafts, another stream's token, and a chunk of a "
        "prompt; two drafts are right, so that the first stream gets three tokens",
    )
    canvas.text(_LEFT, 28, "one step", "strong", "start")
    canvas.text(_OUT, 28, "what comes of it", "strong", "start")
    _stream(canvas, 0, "stream A", ["for", "i", "in", "list"], num_right=2, comes="i  in  range")
    _stream(canvas, 1, "stream B", ["sky"], num_right=0, comes="is")
    y = _top(2)
    canvas.text(_LEFT - 16, y + 20, "prompt C", "", "end")
    canvas.box(_LEFT, y, 5 * _CELL - 8, _HEIGHT, ["a chunk, as long as the time allows"])
    canvas.arrow([(_LEFT + 5 * _CELL, y + 15), (_OUT - 12, y + 15)])
    canvas.text(_OUT, y + 20, "computed so far", "faint", "start")
    canvas.text(
        _LEFT,
        _top(3) + 8,
        "Each row is sampled as it would be without drafts. A draft that is the very token sampled",
        "faint",
        "start",
    )
    canvas.text(
        _LEFT,
        _top(3) + 26,
        "before it counts, and so does the token behind it. What follows a wrong one is dropped.",
        "faint",
        "start",
    )
    return canvas.svg()


def _top(row: int) -> int:
    return 44 + row * _ROW


def _stream(
    canvas: Canvas, row: int, name: str, tokens: list[str], *, num_right: int, comes: str
) -> None:
    """Its known token, and drafts behind it."""
    y = _top(row)
    canvas.text(_LEFT - 16, y + 20, name, "", "end")
    for i, token in enumerate(tokens):
        is_right = 1 <= i <= num_right
        canvas.box(_LEFT + i * _CELL, y, _CELL - 8, _HEIGHT, [token], is_chosen=is_right)
        if i:
            words = "right" if is_right else "wrong"
            canvas.text(_LEFT + i * _CELL + _CELL / 2 - 4, y + _HEIGHT + 15, words, "faint")
    end = _LEFT + len(tokens) * _CELL
    canvas.arrow([(end, y + 15), (_OUT - 12, y + 15)], is_way=bool(num_right))
    canvas.text(_OUT, y + 20, comes, "strong", "start")
