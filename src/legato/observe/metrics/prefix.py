"""The prefix of metrics' names, in a module of its own: the others take a while to import."""

from typing import Literal

MetricsPrefix = Literal["legato", "vllm"]
"""Prefix of metrics that vLLM has too; Legato's own always begin with "legato"."""
