"""Decodes with weights in fp8, where the device multiplies them, with fast additions."""

import torch

from benchmarks.gpu.figures import Report
from benchmarks.gpu.parts import steps
from benchmarks.gpu.settings import Settings
from legato.core.errors import ConfigError
from legato.gpu.weights import check_fp8

TITLE = "Decodes with weights in fp8"


def run(settings: Settings, report: Report) -> None:
    try:
        check_fp8(torch.bfloat16, settings.torch_device)
    except ConfigError as error:
        report.note(f"Not here: {error}.")
        return
    steps.of_quantized(settings, "fp8", report)
