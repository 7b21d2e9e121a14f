"""An environment of its own for each client, kept in the user's cache from one run to the next."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import platformdirs

from benchmarks.clients.catalog import Client

SCRIPTS = Path(__file__).parent / "scripts"
_INSTALL_TORCH = Path(__file__).parents[2] / "scripts" / "install_torch.py"
_MADE = "made-of.json"


class Environment:
    """A virtual environment, or a folder with node_modules.

    Attributes:
        folder: where it is.
    """

    def __init__(self, client: Client) -> None:
        self.folder = platformdirs.user_cache_path("legato") / "clients" / client.key
        self._client = client

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    def make(self, update: bool) -> None:
        """Install the client's current version, unless it is there and `update` is false.

        Raises:
            subprocess.CalledProcessError: pip or npm failed; `stderr` says why.
        """
        if not update and self._is_made():
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        if self._client.registry == "npm":
            self._npm("init", "--yes")
            self._npm("install", *self._client.packages)
        else:
            self._make_venv()
        (self.folder / _MADE).write_text(json.dumps(self._client.packages))

    def version(self) -> str:
        """The client's own."""
        package = self._client.package
        if self._client.registry == "npm":
            manifest = self.folder / "node_modules" / package / "package.json"
            version: str = json.loads(manifest.read_bytes())["version"]
            return version
        asked = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
        found = subprocess.run([self.python, "-c", asked], capture_output=True, text=True)
        return found.stdout.strip()

    def command(self) -> list[str]:
        """What runs the client's script. Node looks for packages beside it, so it is put there."""
        if not self._client.is_node:
            return [self.python, str(SCRIPTS / self._client.script)]
        for script in SCRIPTS.glob("*.mjs"):
            shutil.copy(script, self.folder)
        return ["node", str(self.folder / self._client.script)]

    def _is_made(self) -> bool:
        made = self.folder / _MADE
        return made.is_file() and json.loads(made.read_text()) == list(self._client.packages)

    def _make_venv(self) -> None:
        _run(sys.executable, "-m", "venv", str(self.folder))
        if self._client.needs_torch:
            _run(self.python, str(_INSTALL_TORCH))
        _run(self.python, "-m", "pip", "--quiet", "install", *self._client.packages)
        if self._client.finish:
            _run(self.python, str(SCRIPTS / self._client.finish))

    def _npm(self, *arguments: str) -> None:
        _run("npm", "--silent", *arguments, folder=self.folder)


def _run(*command: str, folder: Path | None = None) -> None:
    subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
