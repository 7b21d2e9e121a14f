"""What metrics' names begin with: apart from the rest, whose imports take a while."""

from typing import Literal

MetricsPrefix = Literal["legato", "vllm"]
"""Of metrics that vLLM has, too; Legato's own begin with "legato" whatever it is."""
