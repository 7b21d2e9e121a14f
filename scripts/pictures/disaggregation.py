"""How a prompt is computed by one engine and continued by another."""

from scripts.pictures.canvas import Canvas

_LANES = {"client": 70, "router": 270, "prefill": 490, "decode": 710}
_TOP, _ROW = 50, 40


def disaggregation() -> str:
    """SVG: time goes down, and blocks are read while the prompt is still computed."""
    rows = 8
    bottom = _TOP + rows * _ROW + 30
    canvas = Canvas(
        790,
        bottom + 10,
        "The router sends a prompt to the engine that prefills and to the one that decodes, which "
        "reads blocks as they are computed and then answers",
    )
    for name, x in _LANES.items():
        canvas.lane(x, _TOP, bottom)
        canvas.box(x - 55, _TOP - 38, 110, 34, [name])
    x = _LANES

    def at(row: float) -> float:
        return _TOP + row * _ROW

    canvas.arrow([(x["client"], at(0.8)), (x["router"], at(0.8))], "a prompt", is_way=True)
    canvas.arrow([(x["router"], at(1.6)), (x["prefill"], at(1.6))], "for one token", is_way=True)
    canvas.arrow([(x["router"], at(2.4)), (x["decode"], at(2.4))], is_way=True)
    canvas.text((x["router"] + x["prefill"]) / 2, at(2.4) - 6, "with a signed ticket")
    for i in range(3):
        y = at(2.7) + i * _ROW
        canvas.box(x["prefill"] - 62, y, 124, 26, [f"chunk {i + 1}"])
        words = ("its blocks", "more", "the rest")[i]
        canvas.arrow([(x["prefill"] + 62, y + 26), (x["decode"] - 4, y + 26)], words, is_way=True)
    canvas.arrow([(x["decode"], at(6.1)), (x["prefill"], at(6.1))], "all is read: let go")
    canvas.box(x["decode"] - 62, at(6.4), 124, 26, ["last tokens"], is_chosen=True)
    canvas.arrow([(x["decode"], at(7.6)), (x["router"], at(7.6))], "tokens, one after the other")
    canvas.arrow([(x["router"], at(7.8)), (x["client"], at(7.8))], "the answer")
    return canvas.svg()
