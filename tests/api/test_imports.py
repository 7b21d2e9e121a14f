"""What each process imports: what it does not need, every start would wait for.

The server process loads neither models nor tokenizers (torch, really: see test_text_processes).
"""

import subprocess
import sys

import pytest

FORBIDDEN = {
    # What waits for the other processes to be started.
    "legato.api.run": {"torch", "numpy", "transformers", "tokenizers", "fastapi", "uvicorn"},
    "legato.api.http_server": {"torch", "numpy", "transformers", "tokenizers"},
    "legato.observe.metrics.server_metrics": {"torch", "transformers", "tokenizers"},
    # Reads bodies, and speaks no HTTP.
    "legato.api.reading.zygote": {"torch", "fastapi", "starlette", "uvicorn"},
    "legato.engine.main": {"torch", "transformers"},
    "legato.engine.build.builder": {
        "transformers", "tokenizers", "scipy", "rich", "pydantic", "fastapi", "sympy"
    },
    "legato.cli.serve": {"torch", "numpy", "fastapi", "uvicorn", "rich"},
}  # fmt: skip


@pytest.mark.parametrize("module", FORBIDDEN)
def test_imports_no_more_than_it_uses(module: str) -> None:
    code = f"import {module}, sys; print(*({FORBIDDEN[module]} & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []
