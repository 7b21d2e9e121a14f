"""What the web site needs beside the pages; `make site` builds it."""

import re
from pathlib import Path

import pytest
from scripts.site_pages import with_plain_pipes, without_outer_links

ROOT = Path(__file__).parents[2]


def test_navigation_has_every_page_once() -> None:
    named = re.findall(r"[\w/-]+\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")]
    assert sorted(named) == sorted(pages)


@pytest.mark.parametrize(
    ("markdown", "on_the_site"),
    [
        ("[deploy](../../deploy) it", "deploy it"),
        ("[`core/plan.py`](../../src/legato/core/plan.py)", "`core/plan.py`"),
        ("[flags](../reference/flags.md#model)", "[flags](../reference/flags.md#model)"),
        ("![stall](../stall.png)", "![stall](../stall.png)"),
    ],
)
def test_links_out_of_the_pages_become_text(markdown: str, on_the_site: str) -> None:
    assert without_outer_links(markdown, "guides/deploy.md") == on_the_site


def test_pipes_in_code_lose_their_backslashes_in_tables_alone() -> None:
    assert with_plain_pipes("| `a\\|b` | c\\|d |") == "| `a|b` | c\\|d |"
    assert with_plain_pipes("not a row: `a\\|b`") == "not a row: `a\\|b`"
