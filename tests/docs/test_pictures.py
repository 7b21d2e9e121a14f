"""The pictures in docs/ are as the code draws them."""

from xml.etree import ElementTree

from scripts.pictures.__main__ import pictures


def test_they_are_drawn_anew_where_the_code_has_changed() -> None:
    """`python -m scripts.pictures` does."""
    for path, svg in pictures().items():
        assert path.read_text(encoding="utf-8") == svg
        ElementTree.fromstring(svg)


def test_all_colours_have_one_for_the_dark() -> None:
    for svg in pictures().values():
        light, _, dark = svg.partition("@media (prefers-color-scheme: dark)")
        kinds = {line.split()[0] for line in light.splitlines() if line.startswith(".")}
        assert {kind for kind in kinds - {".strong"} if kind not in dark} == set()
