"""Legato: LLM serving whose streams never stall.

The public Python API is `LLM`, `SamplingParams` and `StructuredOutputs`. Names are imported when
first used, so that parts that need no torch (the HTTP server, the scheduler) do not load it.
"""

from typing import TYPE_CHECKING, Any

from legato.core.version import __version__

if TYPE_CHECKING:
    from legato.core.sampling_params import SamplingParams
    from legato.core.structured_outputs import StructuredOutputs
    from legato.core.structured_outputs import StructuredOutputs as StructuredOutputsParams
    from legato.engine.llm import LLM

__all__ = ["LLM", "SamplingParams", "StructuredOutputs", "StructuredOutputsParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from legato.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from legato.core.sampling_params import SamplingParams

        return SamplingParams
    if name in ("StructuredOutputs", "StructuredOutputsParams"):  # the latter is vLLM's name
        from legato.core.structured_outputs import StructuredOutputs

        return StructuredOutputs
    raise AttributeError(f"module 'legato' has no attribute {name!r}")
