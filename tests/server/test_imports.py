"""The server process stays free of torch (what it really loads: see test_tokenization)."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["legato.server.run", "legato.observe.metrics.server_metrics"])
def test_imports_no_torch(module: str) -> None:
    code = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
