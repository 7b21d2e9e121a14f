"""`legato chat --url`, with a real server and a real terminal."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import httpx
import pytest

from legato.cli.main import full_parser
from legato.cli.remote_chat import RemoteChat
from legato.core.errors import InvalidRequestError
from tests.api.launch import ServerProcess, running_server
from tests.cli.terminal import Terminal
from tests.cli.test_main import legato
from tests.exact import EXACT

KEY = "secret"
GREEDY = ("--temperature", "0", "--max-tokens", "16")
LONG = ("--max-tokens", "2000", "--seed", "1")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ("--api-key", KEY, *EXACT)
    with running_server(tmp_path_factory.mktemp("server"), *flags) as process:
        yield process


def chat(url: str, lines: str, *flags: str, key: str = KEY) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "legato", "chat", "--url", url, *flags],
        input=lines,
        env={**os.environ, "LEGATO_API_KEY": key},
        capture_output=True,
        text=True,
        check=True,
    )


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b'{"error": null, "choices": [{"delta": {"content": "Hi"}}]}', "Hi"),
        (b'{"error": "it is\\nbroken"}', "it is broken"),
        (b'{"error": {"message": "it is broken"}}', "it is broken"),
    ],
)
def test_errors_of_other_servers(data: bytes, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A string, as Ollama's; null is none."""
    stream = b"data: %b\n\ndata: [DONE]\n\n" % data
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=stream))
    monkeypatch.setattr(httpx, "Client", partial(httpx.Client, transport=transport))
    answer = RemoteChat("http://there", api_key=None, model="m", options={}).answer([])
    try:
        said = next(answer).text
    except InvalidRequestError as error:
        said = str(error)
    assert said == told


def test_a_conversation_is_remembered_until_it_is_reset(server: ServerProcess) -> None:
    question = "What did I just say?\n"
    lines = (
        f"{question}I like green apples.\n{question}/reset\n{question}/timings\n/help\n"
        f"/exit\n{question}"
    )
    done = chat(f"{server.url}/v1/", lines, *GREEDY, "--stop", "\n")
    assert done.stderr == ""
    help_, first, _, with_history, after_reset, timings, again = done.stdout.strip().split("\n")
    assert first == after_reset != with_history
    assert help_ == again
    assert re.fullmatch(r"first token after .* s, \d+ tokens, .* ms each, \d+ a second", timings)
    assert "/reset" in help_


def test_what_goes_wrong_takes_one_line_and_the_chat_goes_on(server: ServerProcess) -> None:
    lines = f"/clera\n{'word ' * 9000}\nWhat is the capital of France?\n"
    done = chat(server.url, lines, *GREEDY)
    unknown, too_long = done.stderr.splitlines()
    assert unknown.startswith("legato: there is no /clera.")
    assert too_long.startswith("legato: 400: ")
    assert "Paris" in done.stdout


def test_who_is_not_let_in_is_told_at_once(server: ServerProcess) -> None:
    done = legato("chat", "--url", server.url, "--api-key", "wrong")
    assert done.returncode == 2
    assert done.stderr == (
        f"legato: {server.url}: 401: the API key is missing or wrong; send "
        "'Authorization: Bearer KEY', or 'x-api-key: KEY'\n"
    )


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "localhost", "http://[", "ftp://x"])
def test_nobody_there(url: str) -> None:
    done = legato("chat", "--url", url)
    assert done.returncode == 2
    assert done.stderr.startswith("legato: ")
    assert len(done.stderr.splitlines()) == 1


def test_flags_of_an_engine_are_for_one() -> None:
    done = legato("chat", "--url", "http://127.0.0.1:1", "--max-num-seqs", "4")
    assert done.stderr.startswith("legato: --max-num-seqs is for a model that is loaded here")


def test_ctrl_c_stops_the_answer_and_not_the_chat(server: ServerProcess) -> None:
    command = [sys.executable, "-m", "legato", "chat", "--url", server.url, "--api-key", KEY]
    terminal = Terminal([*command, *LONG])
    terminal.wait_for(b"> ")
    terminal.type("Tell me a very long story.\n")
    server.wait_for_metric("num_requests_running", 1)
    terminal.type("\x03")
    terminal.wait_for(b"> ")
    server.wait_for_metric("num_requests_running", 0)
    terminal.wait_for(b"/exit or Ctrl-D ends", typing="\x03")  # with nothing to stop
    terminal.type("/exit\n")
    assert terminal.process.wait(60) == 0
    assert b"Traceback" not in terminal.shown


def test_values_out_of_range_are_refused_before_a_question() -> None:
    """Without a server: nothing is asked."""
    args = full_parser().parse_args(["chat", "--url", "http://127.0.0.1:1", "--temperature", "nan"])
    with pytest.raises(InvalidRequestError, match="temperature"):
        args.run(args)
