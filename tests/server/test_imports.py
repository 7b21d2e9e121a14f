"""The server process loads neither models nor tokenizers (torch, really: see test_tokenization)."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["legato.server.run", "legato.observe.metrics.server_metrics"])
def test_imports_no_torch_and_no_tokenizer(module: str) -> None:
    heavy = {"torch", "transformers", "tokenizers"}
    code = f"import {module}, sys; sys.exit(bool({heavy} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", code], check=True)
