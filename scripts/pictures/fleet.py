"""Where a request goes in a fleet."""

from scripts.pictures.canvas import Canvas

_REPLICAS = (
    ("replica 1", "12 blocks cached · would begin in 0.9 s"),
    ("replica 2", "96 blocks cached · would begin in 0.2 s"),
    ("replica 3", "none cached · would begin in 0.5 s"),
)
_CHOSEN = 1
_TOP, _HEIGHT, _APART = 42, 62, 82


def fleet() -> str:
    """SVG: the router sends a request where it breaks the fewest promises."""
    canvas = Canvas(
        820,
        300,
        "Clients ask one server, whose router sends each request where it breaks the fewest "
        "promises, by what replicas tell of their caches and forecasts",
    )
    middle = _TOP + _APART + _HEIGHT / 2
    canvas.box(10, middle - 25, 90, 50, ["clients"])
    canvas.box(190, middle - 62, 150, 124, ["server", "HTTP, templates,", "tokenizer", "router"])
    canvas.arrow([(100, middle - 10), (190, middle - 10)], "a prompt", is_way=True)
    canvas.arrow([(190, middle + 16), (100, middle + 16)])
    canvas.text(145, middle + 34, "tokens")
    for i, (name, told) in enumerate(_REPLICAS):
        y = _TOP + i * _APART
        is_chosen = i == _CHOSEN
        canvas.box(500, y, 310, _HEIGHT, [name, told], is_chosen=is_chosen)
        here = middle + (i - _CHOSEN) * 36
        canvas.arrow([(500, y + _HEIGHT / 2 + 9), (340, here + 9)])
        if is_chosen:
            canvas.arrow([(340, here - 9), (500, y + _HEIGHT / 2 - 9)], "the prompt", is_way=True)
    told = "each tells of blocks that it caches or forgets at once, of its forecasts each second"
    canvas.text(810, 26, told, "faint", "end")
    why = "chosen: where the fewest promises are broken, its own and those of others"
    canvas.text(810, 290, why, "faint", "end")
    return canvas.svg()
