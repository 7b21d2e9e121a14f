"""`python -m scripts.pictures` draws them anew."""

from pathlib import Path

from scripts.pictures.disaggregation import disaggregation
from scripts.pictures.fleet import fleet
from scripts.pictures.rooms import rooms
from scripts.pictures.speculation import speculation

DOCS = Path(__file__).parents[2] / "docs"
GUIDES = DOCS / "guides"


def pictures() -> dict[Path, str]:
    """Key the file, value what is in it."""
    return {
        DOCS / "contributing" / "rooms.svg": rooms(),
        GUIDES / "fleet.svg": fleet(),
        GUIDES / "disaggregation.svg": disaggregation(),
        GUIDES / "speculation.svg": speculation(),
    }


if __name__ == "__main__":
    for path, svg in pictures().items():
        path.write_text(svg, encoding="utf-8")
