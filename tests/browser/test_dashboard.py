"""The dashboard as people see and use it: in Chromium, on a server that computes."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.browser.conftest import KEY
from tests.server.launch import ServerProcess, long_request, wait_until

pytestmark = pytest.mark.browser

AUDIT = (Path(__file__).parent / "audit.js").read_text()
MINUTES_MS = 180_000


def settings(target: ServerProcess) -> dict[str, Any]:
    asked: dict[str, Any] = target.http.get("/settings").json()["asked"]
    return asked


def seconds(text: str) -> float:
    """Of a duration as the page writes it."""
    number, unit = re.match(r"([\d.]+) (ms|s)", text).groups()  # type: ignore[union-attr]
    return float(number) / (1000 if unit == "ms" else 1)


def expect_text(page: Any, selector: str, pattern: str) -> None:
    page.locator(selector).filter(has_text=re.compile(pattern)).wait_for(timeout=MINUTES_MS)


def shoot(page: Any, path: Path, *, full_page: bool = False) -> None:
    page.screenshot(path=path, full_page=full_page)
    assert path.stat().st_size > 20_000, "an empty page"


@pytest.fixture
def given_back(target: ServerProcess) -> Iterator[None]:
    """Settings as they were."""
    before = settings(target)
    yield
    target.http.patch("/settings", json=before).raise_for_status()


def test_it_asks_for_the_key_and_until_it_is_right(blank: Any, target: ServerProcess) -> None:
    blank.goto(f"{target.url}/dashboard")
    for key in ("wrong", KEY):
        expect_text(blank, "#connection-text", "waiting for an API key")
        blank.get_by_label("Key", exact=True).fill(key)
        blank.get_by_role("button", name="Use this key").click()
    expect_text(blank, "#connection-text", "^live")
    blank.reload()
    expect_text(blank, "#connection-text", "^live")


def test_streams_appear_and_go(page: Any, target: ServerProcess) -> None:
    page.get_by_text("As a table").click()
    page.get_by_role("button", name="Start 8 streams").click()
    expect_text(page, "#num-running", "^8$")
    expect_text(page, "#decode-rate", "[1-9]")
    page.locator("#table tr").nth(7).get_by_text("decode").wait_for()
    assert "8 decoding, 0 in prefill, 0 waiting" in page.get_by_role(
        "img", name="Lanes of the running streams"
    ).get_attribute("aria-label")
    expect_text(page, "#last-step", r"last: 8 decode \+ 0 prefill")
    page.get_by_role("button", name="Stop the streams").click()
    expect_text(page, "#num-running", "^0$")
    wait_until(lambda: target.metric("num_requests_running") == 0, "they run on")


def test_what_clients_send_is_text(page: Any, target: ServerProcess) -> None:
    """A request id is the client's own, and the only thing of a request that is shown as it is."""
    hostile = "<img/src=x/onerror=document.title='owned'>"
    headers = {"X-Request-Id": hostile, "Authorization": f"Bearer {KEY}"}
    page.get_by_text("As a table").click()
    with httpx.stream(
        "POST", f"{target.url}/v1/completions", json=long_request(), headers=headers
    ) as response:
        response.raise_for_status()
        page.locator("#table td").filter(has_text=hostile).wait_for()
    assert page.title() == "Legato dashboard"
    assert page.locator("#table img").count() == 0


@pytest.mark.usefixtures("given_back")
def test_settings_by_keyboard_alone(page: Any, target: ServerProcess) -> None:
    def focus(name: str) -> None:
        for _ in range(30):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.name") == name:
                return
        raise AssertionError(f"no way to {name}")

    focus("max_num_batched_tokens")
    page.keyboard.type("32")
    focus("itl_slo_s")
    page.keyboard.type("80.5")
    focus("policy")
    wait_until(lambda: settings(target)["itl_slo_s"] == 0.0805, "not sent")
    assert settings(target)["max_num_batched_tokens"] == 32
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "where the focus is can be seen"


@pytest.mark.usefixtures("given_back")
@pytest.mark.parametrize(
    ("label", "value", "told"),
    [("Tokens a step", "100000", "2112 at most"), ("ITL SLO, ms", "-5", "greater than 0")],
)
def test_a_setting_that_cannot_be_is_refused_and_told(
    page: Any, target: ServerProcess, label: str, value: str, told: str
) -> None:
    before = settings(target)
    field = page.get_by_label(label)
    field.fill(value)
    field.blur()
    expect_text(page, "#settings-message.is-error", told)
    assert field.get_attribute("aria-invalid") == "true"
    assert settings(target) == before


@pytest.mark.usefixtures("given_back")
def test_others_see_a_change_at_once(page: Any, target: ServerProcess) -> None:
    target.http.patch("/settings", json={"ttft_slo_s": 1.25, "policy": "prefill-first"})
    page.wait_for_selector("#policy >> option:checked[value='prefill-first']", state="attached")
    assert page.get_by_label("TTFT SLO, ms").input_value() == "1250"


@pytest.mark.usefixtures("given_back")
def test_a_pasted_prompt_freezes_streams_only_where_it_is_computed_whole(
    page: Any, target: ServerProcess, screenshots: Path
) -> None:
    # A slow machine that others use keeps this, too; one that cannot would let the prompt wait.
    target.http.patch("/settings", json={"itl_slo_s": 0.4, "max_num_batched_tokens": 256})
    before = settings(target)
    page.get_by_role("button", name="Paste a long prompt").click()
    expect_text(page, "#experiment-message", "Computed whole, the prompt stopped the streams")
    page.locator("#paste:enabled").wait_for()
    gaps = [seconds(page.inner_text(f"#{name}-gap")) for name in ("whole", "chunks")]
    assert gaps[0] > 2 * gaps[1]
    assert settings(target) == before
    for scheme in ("dark", "light"):
        page.emulate_media(color_scheme=scheme)
        page.wait_for_timeout(600)  # until it has been drawn anew
        shoot(page, screenshots / f"dashboard-{scheme}.png")
        assert page.evaluate(AUDIT) == {"unnamed": [], "faint": []}


@pytest.mark.usefixtures("given_back")
def test_it_fits_a_phone(page: Any, target: ServerProcess, screenshots: Path) -> None:
    target.http.patch("/settings", json={"itl_slo_s": 0.2})
    thread = threading.Thread(
        target=target.http.post,
        args=("/v1/completions",),
        kwargs={"json": {"prompt": [7] * 1500, "max_tokens": 60, "ignore_eos": True, "n": 2}},
    )
    thread.start()
    page.set_viewport_size({"width": 390, "height": 844})
    expect_text(page, "#num-running", "[1-9]")
    expect_text(page, "#decode-rate", "[1-9]")
    shoot(page, screenshots / "dashboard-phone.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    thread.join()


def test_it_comes_back_after_the_engine_died(page: Any, target: ServerProcess) -> None:
    page.get_by_role("button", name="Start 8 streams").click()
    expect_text(page, "#num-running", "^8$")
    target.engine.kill()
    expect_text(page, "#experiment-message.is-error", "engine")
    wait_until(lambda: target.http.get("/health").status_code == 200, "it is not started again")
    page.get_by_role("button", name="Start 8 streams").click()
    expect_text(page, "#num-running", "^8$")
    expect_text(page, "#last-step", r"last: 8 decode")
