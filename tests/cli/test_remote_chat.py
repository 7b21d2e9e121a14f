"""`legato chat --url`, with a real server and a real terminal."""

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.cli.test_main import legato
from tests.server.launch import ServerProcess, running_server

KEY = "secret"
GREEDY = ("--temperature", "0", "--max-tokens", "16")
LONG = ("--max-tokens", "2000", "--seed", "1")
_PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ("--api-key", KEY, "--dtype", "float32")
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


class Terminal:
    """A chat as somebody at a keyboard has it."""

    def __init__(self, url: str, *flags: str) -> None:
        self._keyboard, screen = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "legato", "chat", "--url", url, "--api-key", KEY, *flags],
            stdin=screen,
            stdout=screen,
            stderr=screen,
            preexec_fn=lambda: _take(screen),
        )
        os.close(screen)
        self.shown = b""

    def type(self, text: str) -> None:
        os.write(self._keyboard, text.encode())

    def wait_for(self, text: bytes) -> None:
        """Until it is shown; it is forgotten then, and all before."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while text not in self.shown:
            assert time.monotonic() < deadline_s, f"no {text!r} in {self.shown!r}"
            if select.select([self._keyboard], [], [], 1.0)[0]:
                self.shown += os.read(self._keyboard, 1 << 16)
        self.shown = self.shown.partition(text)[2]


def _take(screen: int) -> None:
    """Make it the terminal whose Ctrl-C comes here."""
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(screen, termios.TIOCSCTTY, 0)


def test_a_conversation_is_remembered_until_it_is_reset(server: ServerProcess) -> None:
    question = "What did I just say?\n"
    lines = f"{question}I like green apples.\n{question}/reset\n{question}/help\n/exit\n{question}"
    done = chat(f"{server.url}/v1/", lines, *GREEDY, "--stop", "\n")
    assert done.stderr == ""
    help_, first, _, with_history, after_reset, again = done.stdout.strip().split("\n")
    assert first == after_reset != with_history
    assert help_ == again
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
        f"legato: {server.url}: 401: the API key is missing or wrong; send it as "
        "'Authorization: Bearer KEY'\n"
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
    terminal = Terminal(server.url, *LONG)
    terminal.wait_for(b"> ")
    terminal.type("Tell me a very long story.\n")
    server.wait_for_metric("num_requests_running", 1)
    terminal.type("\x03")
    terminal.wait_for(b"> ")
    server.wait_for_metric("num_requests_running", 0)
    terminal.type("\x03")  # with nothing to stop
    terminal.wait_for(b"/exit or Ctrl-D ends")
    terminal.type("/exit\n")
    assert terminal.process.wait(_PATIENCE_S) == 0
    assert b"Traceback" not in terminal.shown
