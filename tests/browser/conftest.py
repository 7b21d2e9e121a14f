"""A real browser on a real server."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.api.launch import ServerProcess, running_server

KEY = "correct-horse"
_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--no-sandbox",  # for tests that run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--host-resolver-rules=MAP *.example 127.0.0.1",
)


@pytest.fixture(scope="package")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    # With the default of drafts, too: what differs from defaults is shown as flags.
    flags = ("--api-key", KEY, "--max-model-len", "2048", "--allowed-host", "dashboard.example",
             "--speculative", "auto")  # fmt: skip
    with running_server(tmp_path_factory.mktemp("dashboard"), *flags) as process:
        process.http.headers["Authorization"] = f"Bearer {KEY}"
        yield process


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra 'browser'")
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=[*_FLAGS])
        yield browser
        browser.close()


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    """That is nowhere yet."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme="dark")
    yield context.new_page()
    context.close()


@pytest.fixture
def blank(tab: Any, target: ServerProcess) -> Iterator[Any]:
    """A tab that must not ask others for anything, nor complain."""
    page = tab
    hosts, complaints = set(), []
    page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text))
    yield page
    assert hosts <= {urlsplit(target.url).netloc}
    # What a browser says of any answer that is an error.
    assert not [text for text in complaints if not text.startswith("Failed to load resource")]


@pytest.fixture
def page(blank: Any, target: ServerProcess) -> Any:
    """The dashboard, with its key, live."""
    blank.goto(f"{target.url}/dashboard")
    blank.get_by_label("Key", exact=True).fill(KEY)
    blank.keyboard.press("Enter")
    blank.locator("#connection.is-live").wait_for()
    return blank


@pytest.fixture(scope="session")
def screenshots(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where they go."""
    folder = request.config.getoption("screenshots")
    return folder or tmp_path_factory.mktemp("screenshots")
