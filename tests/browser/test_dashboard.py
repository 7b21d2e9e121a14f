"""The dashboard as people see and use it: in Chromium, on a server that computes."""

import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tests.api.background import BackgroundRequest
from tests.api.launch import ServerProcess, long_request, running_server, wait_until
from tests.browser.conftest import KEY

pytestmark = pytest.mark.browser

AUDIT = (Path(__file__).parent / "audit.js").read_text()
RECORD_LABELS = (Path(__file__).parent / "labels.js").read_text()
MINUTES_MS = 180_000


def settings(target: ServerProcess) -> dict[str, Any]:
    asked: dict[str, Any] = target.http.get("/settings").json()["asked"]
    return asked


def seconds(text: str) -> float:
    """Of a duration in a text of the page."""
    number, unit = re.search(r"([\d.]+) (ms|s)", text).groups()  # type: ignore[union-attr]
    return float(number) / (1000 if unit == "ms" else 1)


def expect_text(page: Any, selector: str, pattern: str) -> None:
    page.locator(selector).filter(has_text=re.compile(pattern)).wait_for(timeout=MINUTES_MS)


def is_stale(page: Any) -> bool:
    """Whether its figures are grey."""
    return "is-stale" in (page.locator("body").get_attribute("class") or "")


def violations(page: Any) -> list[str]:
    """What axe-core finds."""
    axe = pytest.importorskip("axe_playwright_python", reason="needs the extra 'browser'")
    page.evaluate(files(axe).joinpath("axe.min.js").read_text(encoding="utf-8"))
    found = page.evaluate("axe.run()")["violations"]
    return [f"{f['id']}: {node['html']}" for f in found for node in f["nodes"]]


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
    for key, told in (("wrong", "waiting for an API key"), (KEY, "wrong API key")):
        expect_text(blank, "#connection-text", told)
        assert is_stale(blank)
        assert blank.get_by_role("button", name="Start 8 streams").is_disabled()
        assert violations(blank) == []
        blank.get_by_label("Key", exact=True).fill(key)
        blank.get_by_role("button", name="Use this key").click()
    expect_text(blank, "#connection-text", "^live")
    assert not is_stale(blank)
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


def test_drafts_are_told_and_drawn(tab: Any, tmp_path: Path, screenshots: Path) -> None:
    """Of an output that repeats its prompt."""
    flags = ("--speculative", "4", "--no-calibrate", "--max-model-len", "2048")
    with running_server(tmp_path, *flags) as server:
        tab.goto(f"{server.url}/dashboard")
        tab.locator("#connection.is-live").wait_for()
        tab.get_by_text("As a table").click()
        asked = long_request(prompt=[500, 501, 502, 503] * 40, temperature=0, max_tokens=1800)
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json=asked, timeout=60):
            expect_text(tab, "#last-step", r"1 decode \+ 0 prefill \+ 4 drafts \(4 right\)")
            expect_text(tab, "#drafts-right", r"^\d+ %$")
            expect_text(tab, "#drafts-right-note", r"^of \d+ a second$")
            output = tab.locator("#table tr").first.locator("td").nth(4)
            shown = int(output.inner_text().replace(",", ""))
            assert shown <= server.metric("generation_tokens_total")
            num_steps = server.metric("stream_steps_total")
            wait_until(
                lambda: int(output.inner_text().replace(",", "")) > num_steps + 20,
                "several tokens of a step count as one",
            )
            shoot(tab, screenshots / "dashboard-drafts.png")
        assert violations(tab) == []


def test_what_clients_send_is_text(page: Any, target: ServerProcess) -> None:
    """A request id is the client's own, and the only thing of a request that is shown as it is."""
    hostile = "<img/src=x/onerror=document.title='owned'>"
    headers = {"X-Request-Id": hostile, "Authorization": f"Bearer {KEY}"}
    page.get_by_text("As a table").click()
    asked = long_request(n=8)  # lasts longer than one stream: on a busy machine, the page is slow
    with httpx.stream(
        "POST", f"{target.url}/v1/completions", json=asked, headers=headers
    ) as response:
        response.raise_for_status()
        page.locator("#table td").filter(has_text=hostile).first.wait_for()
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
    [("Tokens a step", "100000", "2112 at most"), ("ITL SLO, ms", "-5", "equal to 0.000001")],
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
def test_a_change_can_be_undone_and_copied(page: Any, target: ServerProcess) -> None:
    before = settings(target)
    for value in ("70", "80.5"):
        page.get_by_label("ITL SLO, ms").fill(value)
        page.get_by_label("ITL SLO, ms").blur()
        wait_until(lambda s=float(value): settings(target)["itl_slo_s"] == s / 1000, "not sent")
    page.locator("#settings-message").filter(has_text="In effect").wait_for()
    page.get_by_role("button", name="Copy as flags").click()
    expect_text(page, "#settings-message code", "^--itl-slo 80.5ms$")
    assert page.evaluate("getSelection().toString()") == "--itl-slo 80.5ms"
    undo = page.get_by_role("button", name="Undo")
    undo.click()
    wait_until(lambda: settings(target)["itl_slo_s"] == 0.07, "not undone")
    undo.click()
    wait_until(lambda: settings(target) == before, "not undone")
    page.locator("#undo:disabled").wait_for()


@pytest.mark.usefixtures("given_back")
def test_a_pasted_prompt_freezes_streams_only_where_it_is_computed_whole(
    page: Any, target: ServerProcess, screenshots: Path
) -> None:
    # Without a promise of the server, the page makes one that this machine, just now, can keep.
    target.http.patch("/settings", json={"max_num_batched_tokens": 256})
    before = settings(target)
    page.get_by_role("button", name="Paste a long prompt").click()
    expect_text(page, "#experiment-message", "Computed whole, the prompt stopped the streams")
    page.locator("#paste:visible").wait_for()
    expect_text(page, "#paste-2-gap", "longest gap")
    # A machine that is busy with other tests may have no time for the prompt: it says so then.
    assert re.search(
        r"under a promise of [\d.]+ m?s.*first token", page.inner_text("#experiment-message")
    )
    whole, chunks, promised = (seconds(page.inner_text(f"#paste-{i}-gap")) for i in range(3))
    assert whole > chunks
    assert whole > promised
    assert settings(target) == before
    for scheme in ("dark", "light"):
        page.emulate_media(color_scheme=scheme)
        page.wait_for_timeout(600)  # until it has been drawn anew
        shoot(page, screenshots / f"dashboard-{scheme}.png", full_page=True)
        assert page.evaluate(AUDIT) == {"unnamed": [], "faint": []}
        assert violations(page) == []


def test_a_paste_can_be_cancelled(page: Any, target: ServerProcess) -> None:
    before = settings(target)
    page.get_by_role("button", name="Paste a long prompt").click()
    expect_text(page, "#experiment-message", r"1 of 3: whole, [\d,]+ of 1,9")
    assert not settings(target)["enable_chunked_prefill"]
    page.get_by_role("button", name="Cancel").click()
    expect_text(page, "#experiment-message", "^Cancelled")
    assert settings(target) == before
    wait_until(lambda: target.metric("num_requests_running") == 0, "they run on")


def test_a_stall_is_seen_while_it_lasts(
    page: Any, target: ServerProcess, screenshots: Path
) -> None:
    """An engine that stands still in a step, and a request that comes meanwhile."""
    page.get_by_role("button", name="Start 8 streams").click()
    expect_text(page, "#num-running", "^8$")
    expect_text(page, "#decode-rate", "[1-9]")
    page.wait_for_timeout(1000)
    target.engine.suspend()
    try:
        # It may have been stopped between two steps, and a step may hold drafts.
        expect_text(
            page, "#last-step.is-late", r"a step of \d+ tokens runs since|no step has ended"
        )
        page.locator("#lanes[aria-label*='8 without a token for more than']").wait_for()
        waiting = BackgroundRequest(target, prompt="Hi", n=3, max_tokens=60, ignore_eos=True)
        expect_text(page, "#num-waiting", "^3 waiting$")
        assert "3 waiting" in page.locator("#lanes").get_attribute("aria-label")
        page.wait_for_timeout(1000)  # for the picture
        shoot(page, screenshots / "dashboard-stall.png", full_page=True)
    finally:
        target.engine.resume()
    expect_text(page, "#num-running", "^11$")
    waiting.join()
    expect_text(page, "#last-step:not(.is-late)", "last: ")
    page.get_by_role("button", name="Stop the streams").click()
    wait_until(lambda: target.metric("num_requests_running") == 0, "they run on")


def test_a_page_that_comes_late_knows_what_was_before(blank: Any, target: ServerProcess) -> None:
    num_seen = 20
    with target.http.stream("POST", "/v1/completions", json=long_request()) as response:
        lines = (line for line in response.iter_lines() if line)
        for _ in range(num_seen):
            next(lines)
        blank.goto(f"{target.url}/dashboard")
        blank.get_by_label("Key", exact=True).fill(KEY)
        blank.keyboard.press("Enter")
        blank.get_by_text("As a table").click()
        cells = blank.locator("#table tr").first.locator("td")
        assert cells.nth(2).inner_text() == "4", "length of its prompt"
        assert int(cells.nth(4).inner_text()) >= num_seen
        assert blank.inner_text("#itl") != "–"


@pytest.mark.usefixtures("given_back")
def test_it_fits_a_phone(page: Any, target: ServerProcess, screenshots: Path) -> None:
    target.http.patch("/settings", json={"itl_slo_s": 0.4})
    page.set_viewport_size({"width": 390, "height": 844})
    page.reload()
    page.get_by_role("button", name="Start 8 streams").click()
    expect_text(page, "#decode-rate", "[1-9]")
    page.wait_for_timeout(2000)  # until the drawing's window is full
    target.http.post("/v1/completions", json={"prompt": [7] * 600, "max_tokens": 4, "n": 2})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.get_by_role("button", name="Paste a long prompt").bounding_box()["y"] < 844
    assert page.evaluate(AUDIT) == {"unnamed": [], "faint": []}
    assert violations(page) == []
    page.evaluate(RECORD_LABELS)
    page.wait_for_timeout(600)
    assert page.evaluate("window.collisions()") == []
    # The bar with the buttons is at the bottom, where a picture of the whole page has its end.
    height = page.evaluate("document.documentElement.scrollHeight")
    page.set_viewport_size({"width": 390, "height": height})
    page.wait_for_timeout(600)
    shoot(page, screenshots / "dashboard-phone.png")
    page.get_by_role("button", name="Stop the streams").click()


def test_what_lies_under_the_pointer_is_told(page: Any) -> None:
    page.get_by_role("button", name="Start 8 streams").click()
    expect_text(page, "#decode-rate", "[1-9]")
    page.locator("#lanes").hover(position={"x": 20, "y": 10})
    expect_text(page, "[role=tooltip]", r"^#\d+: [\d,]+ tokens? of output, prompt of \d+ tokens")
    page.keyboard.press("Escape")
    assert page.locator("[role=tooltip]").is_hidden()
    page.get_by_role("button", name="Stop the streams").click()


def has_engine_after(died: psutil.Process, server: ServerProcess) -> bool:
    """Whether another engine than the one that died is being started, or runs."""
    with suppress(ValueError, psutil.NoSuchProcess):  # there is none yet
        return server.engine != died
    return False


def test_it_comes_back_after_the_engine_died(page: Any, target: ServerProcess) -> None:
    num_tokens = target.metric("generation_tokens_total")
    page.get_by_role("button", name="Start 8 streams").click()
    expect_text(page, "#num-running", "^8$")
    wait_until(
        lambda: target.metric("generation_tokens_total") > num_tokens + 80,
        "they do not begin",  # and would be run again
    )
    died = target.engine
    died.kill()
    wait_until(lambda: has_engine_after(died, target), "none is started")
    # A page on a busy machine may never draw what lasts less than a second.
    target.engine.suspend()
    try:
        expect_text(page, "#trouble", "died and is being restarted")
        assert is_stale(page)
    finally:
        target.engine.resume()
    expect_text(page, "#num-running", "^0$")
    assert page.inner_text("#itl") != "–", "what was before is still seen"
    expect_text(page, "#experiment-message.is-error", "engine")
    wait_until(lambda: target.http.get("/health").status_code == 200, "it is not started again")
    page.get_by_role("button", name="Start 8 streams").click()
    expect_text(page, "#num-running", "^8$")
    expect_text(page, "#last-step", r"last: 8 decode")
    expect_text(page, "#restarts", "^1$")
    assert not is_stale(page)


def test_a_server_that_drains_or_is_gone_is_told_and_the_next_is_found(
    tab: Any, tmp_path: Path
) -> None:
    with running_server(tmp_path) as first:
        tab.goto(f"{first.url}/dashboard")
        expect_text(tab, "#connection-text", "^live")
        with first.http.stream("POST", "/v1/completions", json=long_request()) as response:
            lines = response.iter_lines()  # whose end would be that of the stream
            next(lines)
            first.process.send_signal(signal.SIGTERM)
            expect_text(tab, "#connection-text", "^draining: 1 request left, no more taken$")
        first.process.wait()
        expect_text(tab, "#connection-text", "no answer from the server|drained")
        assert is_stale(tab)
        port = urlsplit(first.url).port
    with running_server(tmp_path, "--port", str(port)):
        expect_text(tab, "#connection-text", "^live")
        assert not is_stale(tab)
