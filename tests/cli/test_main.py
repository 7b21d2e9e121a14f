"""The `legato` command from outside."""

import socket
import subprocess
import sys

import pytest

from legato import __version__
from tests.forks.start import run


def legato(*args: str) -> "subprocess.CompletedProcess[str]":
    return run("legato", *args)


def test_version() -> None:
    command = [sys.executable, "-m", "legato", "--version"]
    assert subprocess.check_output(command, text=True) == f"legato {__version__}\n"


def test_help_names_the_commands() -> None:
    text = legato("--help").stdout
    assert all(command in text for command in ("serve", "generate", "chat"))


def test_commands_load_what_they_need_when_they_run() -> None:
    code = (
        "import sys\n"
        "from legato.cli.main import _COMMANDS, _parser\n"
        "_parser(_COMMANDS)\n"
        "sys.exit(str({'torch', 'transformers', 'fastapi', 'rich'} & set(sys.modules) or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "COMMAND"),
        (("frobnicate",), "frobnicate"),
        (("serve", "no/such/model", "--port", "0"), "no model at 'no/such/model'"),
        (("serve", "one", "--model", "other"), "two models were named"),
        (("serve", "--max-num-seqs", "0"), "max_num_seqs"),
        (("serve", "--port", "70000"), "port"),
        (("serve", "--api-key", ","), "--api-key"),
        (("serve", "--host", "256.0.0.1"), "cannot listen on 256.0.0.1:8000"),
        (("serve", "--max-model-len", "99999", "--port", "0"), "max_model_len must be in"),
        (("serve", "--revision", "main", "--port", "0"), "only hub models have revisions"),
        (("serve", "--chat-template", "none.jinja", "--port", "0"), "none.jinja cannot be read"),
        (("serve", "--chat-template", "{% if %}", "--port", "0"), "not valid Jinja: line 1: "),
        (
            (
                "serve",
                "--chat-template",
                "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
                "--timeout-prompt",
                "100ms",
                "--port",
                "0",
            ),
            "more than 0.1 s",
        ),
    ],
)
def test_user_errors_are_one_clear_line(args: tuple[str, ...], message: str) -> None:
    done = legato(*args)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_port_in_use_is_found_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = legato("serve", "--port", str(port))
    assert done.returncode == 2
    assert done.stderr == f"legato: cannot listen on 127.0.0.1:{port}: Address already in use\n"
