"""Decodes with weights in int4."""

from benchmarks.gpu.figures import Report
from benchmarks.gpu.parts import steps
from benchmarks.gpu.settings import Settings

TITLE = "Decodes with weights in int4"


def run(settings: Settings, report: Report) -> None:
    steps.of_quantized(settings, "int4", report)
