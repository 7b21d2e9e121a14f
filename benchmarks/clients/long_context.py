"""A server with room for the prompts of coding agents."""

import shlex
from pathlib import Path

from benchmarks.runner.servers import SERVE
from legato.core.config import DEFAULT_MODEL

_SHAPE = Path(__file__).parent / "shape"
LONG_CONTEXT = shlex.join(
    [
        *shlex.split(SERVE),
        str(_SHAPE),
        *("--load-format", "dummy", "--tokenizer", DEFAULT_MODEL),
        *("--kv-cache-memory", "512M"),
    ]
)
"""Random weights of a small model with 32k tokens of context, and the default one's tokenizer."""
