"""The `legato` command from outside."""

import argparse
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from legato import __version__
from legato.cli.main import _COMMANDS, _asked_for, _parser, full_parser, main
from legato.core.version import install_command
from legato.model.native_kernels import native_instructions
from tests.forks.start import run

PLUGINS = [command for command, plugin in _COMMANDS.items() if plugin]


def legato(*args: str) -> "subprocess.CompletedProcess[str]":
    return run("legato", *args)


def test_version() -> None:
    command = [sys.executable, "-m", "legato", "--version"]
    version, build, kernels = subprocess.check_output(command, text=True).splitlines()
    assert version == f"legato {__version__}"
    assert re.fullmatch(r"build: Python \S+ on \S+, torch \S+", build)
    here = native_instructions()
    assert kernels.startswith(f"kernels: {', '.join(here)} here, of " if here else "kernels: ")


@pytest.mark.parametrize(
    ("built", "runnable", "told"),
    [
        ((), ("avx2",), "none built, torch computes the layers"),
        (("avx2", "amx"), (), "torch here, of amx, avx2 built"),
        (("avx2", "avx512"), ("avx512", "avx2"), "avx512, avx2 here, of avx512, avx2 built"),
    ],
)
def test_the_version_tells_which_kernels_run_here(
    built: tuple[str, ...],
    runnable: tuple[str, ...],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    modules = {f"legato._kernels_{name}" for name in built}
    processor = SimpleNamespace(instructions=lambda: runnable)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name in modules or None)
    monkeypatch.setattr("legato._processor", processor, raising=False)
    monkeypatch.setitem(sys.modules, "legato._processor", processor)
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code in (0, None)
    assert capsys.readouterr().out.splitlines()[-1] == f"kernels: {told}"


def test_help_names_the_commands() -> None:
    text = legato("--help").stdout
    assert re.findall(r"^  legato ([a-z]+) ", text, re.MULTILINE) == ["serve", "chat", "models"]
    assert re.findall(r"^    ([a-z]+)(?: |$)", text, re.MULTILINE) == [*_COMMANDS]


def test_commands_load_what_they_need_when_they_run() -> None:
    code = (
        "import sys\n"
        "from legato.cli.main import full_parser\n"
        "full_parser()\n"
        "sys.exit(str({'torch', 'transformers', 'fastapi', 'rich'} & set(sys.modules) or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


@pytest.mark.parametrize("args", [("serve", "--help"), ("--help",)])
def test_what_is_not_named_is_not_looked_for(args: tuple[str, ...]) -> None:
    """Neither entry points nor the packages that they lead to."""
    code = (
        "import contextlib, sys\n"
        "from legato.cli.main import main\n"
        "with contextlib.suppress(SystemExit):\n"
        "    main(sys.argv[1:])\n"
        "loaded = {'importlib.metadata', 'legato_fleet', 'legato_lab'} & set(sys.modules)\n"
        "sys.exit(str(loaded or ''))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, check=False
    )
    assert done.stderr.strip() == ""
    assert "usage: legato" in done.stdout


def helps(parser: argparse.ArgumentParser) -> dict[str, str | None]:
    """Key a command; value what `--help` says of it."""
    assert parser._subparsers is not None
    (action,) = parser._subparsers._group_actions
    assert isinstance(action, argparse._SubParsersAction)
    return {choice.dest: choice.help for choice in action._choices_actions}


def test_help_says_of_plugins_what_they_say() -> None:
    assert helps(_parser(_asked_for(["--help"]))) == helps(full_parser())


@pytest.fixture
def no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: [])


@pytest.mark.usefixtures("no_plugins")
@pytest.mark.parametrize("command", PLUGINS)
def test_a_missing_plugin_is_named_with_its_extra(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but the demo need more than their package, and would name another extra next."""
    extra = {"demo": "lab", "simulate": "bench"}.get(command, command)
    message = f"legato: {command} is not installed: {install_command(extra)}\n"
    for args in ([command, "--help"], [command, "some", "--thing"]):
        assert main(args) == 2
        assert capsys.readouterr() == ("", message)


@pytest.mark.usefixtures("no_plugins")
def test_without_plugins_all_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert [*helps(full_parser())] == [*_COMMANDS]
    assert main(["completion", "bash"]) == 0
    (commands,) = re.findall(r"_legato_subparsers=\((.*)\)", capsys.readouterr().out)
    assert commands.split() == [*_COMMANDS]


@pytest.mark.parametrize("is_activated", [False, True])
def test_what_is_missing_is_installed_for_this_python(
    is_activated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a clone, `make serve` leaves the shell's own `pip` another Python's."""
    folders = [tmp_path / "own", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
        (folder / "pip").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(folders[0] / "python"))
    monkeypatch.setenv("PATH", str(folders[not is_activated]))
    pip = "pip" if is_activated else f"{folders[0]}/python -m pip"
    assert install_command("tune") == f"{pip} install 'legato-llm[tune]'"


@pytest.fixture
def broken(tmp_path: Path) -> Mapping[str, str]:
    """An environment with a distribution whose modules are not there."""
    info = tmp_path / "broken-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    lines = "".join(f"{command} = no_such_package.{command}\n" for command in PLUGINS)
    (info / "entry_points.txt").write_text(f"[legato.commands]\n{lines}")
    return os.environ | {"PYTHONPATH": str(tmp_path)}


def in_environment(
    environment: Mapping[str, str], *args: str
) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "legato", *args]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_a_broken_plugin_breaks_itself_alone(broken: Mapping[str, str]) -> None:
    done = in_environment(broken, "bench", "--help")
    assert done.returncode == 2
    assert done.stderr == (
        "legato: bench cannot be loaded (No module named 'no_such_package'): "
        f"{install_command('bench')}\n"
    )
    for args in (("serve", "--help"), ("--help",), ("completion", "bash")):
        done = in_environment(broken, *args)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "COMMAND"),
        (("frobnicate",), "frobnicate"),
        (("serve", "no/such/model", "--port", "0"), "no model at 'no/such/model'"),
        (("serve", "one", "--model", "other"), "two models were named"),
        (("chat", "one", "--model", "other"), "two models were named"),
        (("calibrate", "no/such/model"), "no model at 'no/such/model'"),
        (("serve", "--max-num-seqs", "0"), "--max-num-seqs"),
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
