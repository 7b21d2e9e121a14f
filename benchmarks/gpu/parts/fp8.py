"""Decodes with weights in fp8, where the device multiplies them."""

import torch

from benchmarks.gpu.figures import Figures
from benchmarks.gpu.parts import steps
from benchmarks.gpu.settings import Settings
from legato.core.errors import ConfigError
from legato.gpu.weights import check_fp8


def run(settings: Settings) -> Figures:
    try:
        check_fp8(torch.bfloat16, settings.torch_device)
    except ConfigError as error:
        return Figures(title="Decodes with weights in fp8", notes=[f"Not here: {error}."])
    return steps.of_quantized(settings, "fp8")
