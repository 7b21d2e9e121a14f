"""The API's reference, in a browser that has no key."""

from typing import Any

import pytest

from tests.api.launch import ServerProcess

pytestmark = pytest.mark.browser


def test_the_reference_shows_all_endpoints(blank: Any, target: ServerProcess) -> None:
    blank.goto(f"{target.url}/docs")
    blank.locator(".opblock").first.wait_for()
    shown = set(blank.locator(".opblock-summary-path").all_inner_texts())
    document = target.http.get("/openapi.json").json()
    assert {path.replace("\u200b", "") for path in shown} == set(document["paths"])
    blank.locator('.opblock-summary-path[data-path="/v1/chat/completions"]').click()
    blank.get_by_text("Request body").first.wait_for()
