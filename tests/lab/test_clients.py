"""`benchmarks.clients`, here with the one client that tests have, and with scripts that fail."""

import sys
from datetime import date
from pathlib import Path

import pytest
from benchmarks.clients.capabilities import AGENT, BENCHMARK, LIBRARY
from benchmarks.clients.catalog import CLIENTS
from benchmarks.clients.environment import SCRIPTS
from benchmarks.clients.page import Row, page
from benchmarks.clients.tokenizer import save_tokenizer
from benchmarks.clients.trial import Outcome, Target, outcomes
from benchmarks.runner.machine import Machine
from transformers import AutoTokenizer

from tests.api.launch import MODEL, ServerProcess
from tests.api.servers import TRUSTING, Servers

_PROTOCOL = f"import sys; sys.path.insert(0, {str(SCRIPTS)!r}); from protocol import *"


@pytest.fixture(scope="module")
def server(servers: Servers) -> ServerProcess:
    return servers.get(*TRUSTING)


def tried(script: str, tmp_path: Path, url: str = "http://127.0.0.1:1") -> dict[str, Outcome]:
    target = Target(url, MODEL, tmp_path)
    path = tmp_path / "script.py"
    path.write_text(f"{_PROTOCOL}\n{script}")
    found = outcomes([sys.executable, str(path)], target, 1, tmp_path)
    return {outcome.capability: outcome for outcome in found}


def test_openais_client_can_do_all(server: ServerProcess, tmp_path: Path) -> None:
    script = str(SCRIPTS / CLIENTS["openai"].script)
    target = Target(server.url, MODEL, tmp_path)
    found = outcomes([sys.executable, script], target, 60, tmp_path)
    assert [outcome.capability for outcome in found] == list(LIBRARY)
    assert [outcome for outcome in found if outcome.status != "ok"] == []


def test_what_a_script_cannot_is_told(tmp_path: Path) -> None:
    script = """
@can("chat")
def refuses(): raise ValueError("no")
@can("stream")
def is_at_fault(): raise ClientFaultError("it never could")
@can("tool")
async def hangs(): await asyncio.sleep(60)
@can("schema")
def hangs_too(): time.sleep(60)
@can("error")
def dies(): os._exit(3)
@can("cancel")
def is_not_come_to(): pass
run()
"""
    found = tried(script, tmp_path)
    assert found["chat"] == Outcome("chat", "failed", "ValueError: no")
    assert found["stream"] == Outcome("stream", "client", "it never could")
    assert "TimeoutError" in found["tool"].message
    assert "OutOfTimeError" in found["schema"].message
    assert all("ended with 3" in found[name].message for name in ("error", "cancel"))


def test_a_script_that_cannot_start_has_failed(tmp_path: Path) -> None:
    found = tried("import no_such_client", tmp_path)
    assert [outcome.status for outcome in found.values()] == ["failed"]
    assert "no_such_client" in found["chat"].message


def test_each_client_has_its_script() -> None:
    assert {client.script for client in CLIENTS.values()} == {
        path.name for path in SCRIPTS.glob("with_*")
    }


@pytest.mark.parametrize(
    ("key", "package"),
    [
        ("codex", "@openai/codex"),
        ("opencode", "opencode-ai"),
        ("aider", "aider-chat"),
        ("lm-eval", "lm_eval"),
    ],
)
def test_a_package_has_no_version(key: str, package: str) -> None:
    assert CLIENTS[key].package == package


def test_the_page_numbers_what_does_not_work() -> None:
    library = Row(
        CLIENTS["openai"],
        "1.2",
        [Outcome("chat", "ok", ""), Outcome("tool", "failed", "no\ntools")],
    )
    benchmark = Row(CLIENTS["aiperf"], "3", [Outcome("lengths", "client", "miscounts")])
    agent = Row(CLIENTS["codex"], "4", [Outcome("second turn", "ok", "0.1 s")])
    text = page([library, benchmark, agent], date(2026, 1, 2), Machine.here())
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    cells = {row[0].removeprefix("| "): row[2:] for row in rows}
    failed, lacking = cells["openai (Python)"]
    assert failed == "✗ tool[^1]"
    assert lacking.removesuffix(" |").split(", ") == [
        name for name in LIBRARY if name not in ("chat", "tool")
    ]
    failed, lacking = cells["aiperf"]
    assert failed == "(✗) lengths[^2]"
    assert lacking.count(",") == len(BENCHMARK) - 2
    failed, lacking, second_turn = cells["Codex"]
    assert not failed
    assert lacking.count(",") == len(AGENT) - 2
    assert second_turn == "0.1 s |"
    assert "[^1]: openai (Python), tool: no tools" in text
    assert "[^2]: aiperf, lengths: miscounts" in text


def test_the_tokenizer_counts_as_the_server_does(server: ServerProcess, tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    text = "It was a bright cold day in April."
    counted = server.http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    assert AutoTokenizer.from_pretrained(tmp_path).encode(text) == counted
