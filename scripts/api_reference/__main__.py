"""Writes the API reference: `python -m scripts.api_reference`."""

from scripts.api_reference.pages import PAGES, rendered

for page in PAGES:
    page.write_text(rendered(page), encoding="utf-8")
    print(page)
