"""The decodes of `fp8`, with no fast additions."""

from benchmarks.gpu.figures import Report
from benchmarks.gpu.parts import fp8
from benchmarks.gpu.settings import Settings
from legato.gpu import linear

TITLE = "Decodes with weights in fp8, added exactly"


def run(settings: Settings, report: Report) -> None:
    linear.MOST_FAST_DEPTH = 0
    fp8.run(settings, report)
