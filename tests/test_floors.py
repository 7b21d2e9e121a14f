"""The scheduler and the KV manager stay free of torch (see also the import contracts)."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "legato.core.config",
        "legato.kv.manager",
        "legato.scheduler.scheduler",
        "legato.executor.simulated",
        "legato.engine.loop.engine_loop",
    ],
)
def test_imports_no_torch(module: str) -> None:
    code = f"import {module}, sys; sys.exit(bool({{'torch', 'transformers'}} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)
