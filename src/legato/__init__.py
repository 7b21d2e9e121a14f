"""Legato: LLM serving whose streams never stall.

The public Python API is `LLM`, `AsyncLLM` and `SamplingParams`. Names are imported when first
used, so that parts that need no torch (the HTTP server, the scheduler) do not load it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from legato.core.version import __version__

if TYPE_CHECKING:
    from legato.core.sampling_params import SamplingParams
    from legato.engine.async_llm import AsyncEngineArgs, AsyncLLM
    from legato.engine.llm import LLM

__all__ = ["LLM", "AsyncEngineArgs", "AsyncLLM", "SamplingParams", "__version__"]

_HOMES = {
    "AsyncEngineArgs": "legato.engine.async_llm",
    "AsyncLLM": "legato.engine.async_llm",
    "LLM": "legato.engine.llm",
    "SamplingParams": "legato.core.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'legato' has no attribute {name!r}")
