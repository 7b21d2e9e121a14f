"""Decodes with weights in int4."""

from benchmarks.gpu.figures import Figures
from benchmarks.gpu.parts import steps
from benchmarks.gpu.settings import Settings


def run(settings: Settings) -> Figures:
    return steps.of_quantized(settings, "int4")
