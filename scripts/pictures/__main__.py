"""`python -m scripts.pictures` draws them anew."""

from pathlib import Path

from scripts.pictures.disaggregation import disaggregation
from scripts.pictures.fleet import fleet
from scripts.pictures.speculation import speculation

GUIDES = Path(__file__).parents[2] / "docs" / "guides"


def pictures() -> dict[Path, str]:
    """Key the file, value what is in it."""
    return {
        GUIDES / "fleet.svg": fleet(),
        GUIDES / "disaggregation.svg": disaggregation(),
        GUIDES / "speculation.svg": speculation(),
    }


if __name__ == "__main__":
    for path, svg in pictures().items():
        path.write_text(svg, encoding="utf-8")
