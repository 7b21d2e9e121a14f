"""Legato: LLM serving whose streams never stall.

The public Python API is `LLM`, `AsyncLLM`, `SamplingParams` and `StructuredOutputs`. Names are
imported when first used, so that parts that need no torch (the HTTP server, the scheduler) do not
load it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from legato.core.version import __version__

if TYPE_CHECKING:
    from legato.core.sampling_params import SamplingParams
    from legato.core.structured_outputs import StructuredOutputs
    from legato.core.structured_outputs import StructuredOutputs as StructuredOutputsParams
    from legato.llm.async_llm import AsyncEngineArgs, AsyncLLM
    from legato.llm.llm import LLM

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "SamplingParams",
    "StructuredOutputs",
    "StructuredOutputsParams",
    "__version__",
]

_HOMES = {
    "AsyncEngineArgs": "legato.llm.async_llm",
    "AsyncLLM": "legato.llm.async_llm",
    "LLM": "legato.llm.llm",
    "SamplingParams": "legato.core.sampling_params",
    "StructuredOutputs": "legato.core.structured_outputs",
}
_VLLMS_NAMES = {"StructuredOutputsParams": "StructuredOutputs"}


def __getattr__(name: str) -> Any:
    own = _VLLMS_NAMES.get(name, name)
    if own in _HOMES:
        return getattr(importlib.import_module(_HOMES[own]), own)
    raise AttributeError(f"module 'legato' has no attribute {name!r}")
