"""Completion in a shell, by the shell."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.terminal import Terminal
from tests.cli.test_main import legato

ASK = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
$(complete -p legato | sed 's/.*-F \\([^ ]*\\).*/\\1/')
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "legato.bash"
    path.write_text(legato("completion", "bash").stdout)
    return path


def completed(script: Path, *words: str) -> set[str]:
    command = ["bash", "-c", ASK, "bash", str(script), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=script.parent)
    assert done.stderr == ""
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("legato", "se"), {"serve"}),
        (("legato", "completion", ""), {"bash", "zsh", "fish"}),
        (("legato", "serve", "--timeout-d"), {"--timeout-drain"}),
        (("legato", "serve", "--dtype", "f"), {"float16", "float32"}),
        (("legato", "serve", "--port", "0", "--no-calib"), {"--no-calibrate"}),
        (("legato", "bench", "ca"), {"capacity"}),
        (("legato", "bench", "run", "--workl"), {"--workload"}),
        (("legato", "trace", "convert", "lega"), {"legato.bash"}),
        (("legato", "serve", "--config", "lega"), {"legato.bash"}),
    ],
)
def test_bash_completes(script: Path, words: tuple[str, ...], found: set[str]) -> None:
    assert completed(script, *words) == found


def test_the_tab_key(script: Path) -> None:
    terminal = Terminal(["bash", "--norc", "--noprofile", "-i"])
    terminal.type(f"bind 'set enable-bracketed-paste off'; source {script}; echo rea''dy\n")
    terminal.wait_for(b"ready")
    terminal.type("legato serve --itl-s\t")
    terminal.wait_for(b"--itl-slo")
    terminal.type("\x15exit\n")
    assert terminal.process.wait(60) == 0


@pytest.mark.parametrize(("shell", "check"), [("zsh", "-n"), ("fish", "--no-execute")])
def test_other_shells_read_their_scripts(shell: str, check: str, tmp_path: Path) -> None:
    done = legato("completion", shell)
    assert done.returncode == 0
    assert "itl-slo" in done.stdout
    if shutil.which(shell):
        path = tmp_path / "script"
        path.write_text(done.stdout)
        subprocess.run([shell, check, str(path)], check=True)
