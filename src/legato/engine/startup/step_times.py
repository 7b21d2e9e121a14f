"""What is known of step times at a start: read from disk or measured, and kept where it can be.

A measurement beside other programs does for the moment, but is not kept: the next start measures
anew, and this one does when nothing is to be done.
"""

import hashlib
import logging
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import torch

from legato.core.config import SchedulerConfig
from legato.core.version import __version__
from legato.engine.startup.calibration import (
    MOST_DRAFTS,
    ON_A_CPU,
    SHORTEST_CHUNK,
    Calibration,
    Extent,
)
from legato.engine.startup.calibration_file import CalibrationFile, Measurements, shape_counts
from legato.engine.startup.core_wait import CoreWait
from legato.engine.startup.quality import Quality
from legato.engine.startup.recalibration import Recalibration
from legato.scheduler.cost_fit import MeasuredStep
from legato.scheduler.step_time import StepTimeModel

if TYPE_CHECKING:
    from legato.engine.startup.build import EngineParts

logger = logging.getLogger(__name__)

_LONGEST_IDLE_STEP_S = 0.2
"""Of a calibration while requests may come: they wait for its step."""


@dataclass(frozen=True)
class KnownSteps:
    """Attributes: quality: None where they were read, or there are none."""

    steps: list[MeasuredStep]
    quality: Quality | None = None

    @property
    def is_doubtful(self) -> bool:
        return self.quality is not None and bool(self.quality.doubt)


def known_steps(parts: "EngineParts") -> KnownSteps:
    """Steps to begin the step-time model with, where a promise needs it: from disk, or measured."""
    scheduler, calibration = parts.config.scheduler, parts.config.calibration
    if not (scheduler.promises_pace or scheduler.promises_ttft):
        return KnownSteps([])
    steps = calibration_file(parts).load()
    if steps is None and calibration.calibrate:
        return measure_steps(parts, new_calibration(parts))
    return KnownSteps(steps or [])


def measure_steps(parts: "EngineParts", calibration: Calibration) -> KnownSteps:
    """Measure, and keep that for later starts unless there is doubt about it."""
    # Imported here because a start that has measurements need not wait for it.
    from rich.console import Console
    from rich.progress import Progress

    wait = CoreWait()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("Measuring step times", total=1.0)
        steps = calibration.run(lambda share: progress.update(bar, completed=share))
    quality = Quality.of(steps, calibration.rows, wait.share)
    if quality.doubt:
        logger.warning(
            "step times were measured beside something else, and are not kept: %s", quality.doubt
        )
    else:
        calibration_file(parts).save(measurements(parts, steps))
    return KnownSteps(steps, quality)


def recalibration(parts: "EngineParts", step_time: StepTimeModel) -> Recalibration:
    """What measures again in quiet times, for this model and for later starts."""

    def keep(steps: list[MeasuredStep]) -> None:
        step_time.begin_again(steps)
        calibration_file(parts).save(measurements(parts, steps))

    def begin(block_ids: Sequence[int]) -> Calibration:
        return new_calibration(parts, block_ids, _LONGEST_IDLE_STEP_S)

    return Recalibration(parts.kv, begin, keep)


def new_calibration(
    parts: "EngineParts", block_ids: Sequence[int] | None = None, longest_step_s: float = 0.5
) -> Calibration:
    """What measures the steps of this model; `block_ids`: None takes all."""
    scheduler = parts.config.scheduler
    assert scheduler.max_num_seqs is not None
    return Calibration(
        parts.executor,
        block_ids=range(parts.kv.num_blocks) if block_ids is None else block_ids,
        block_size=parts.kv.block_size,
        max_model_len=parts.max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
        vocab_size=parts.spec.vocab_size,
        most_drafts=scheduler.most_samples - scheduler.max_num_seqs,
        rows=parts.rows,
        extent=_extent(parts.model.device, scheduler),
        longest_step_s=longest_step_s,
    )


def _extent(device: torch.device, config: SchedulerConfig) -> Extent:
    if device.type == "cpu":
        return ON_A_CPU
    assert config.max_num_batched_tokens is not None
    # There is no room for longer steps than those of the budget.
    longest_chunk = min(4096, max(config.max_num_batched_tokens, SHORTEST_CHUNK))
    return Extent(longest_chunk, 32_768, reads_unwritten=True)


def measurements(parts: "EngineParts", steps: Sequence[MeasuredStep]) -> Measurements:
    """These steps, and what they were measured on."""
    return Measurements(
        figures="measured",
        about=calibration_file(parts).about,
        steps=[(shape_counts(shape), seconds) for shape, seconds in steps],
        rows=parts.rows,
        max_model_len=parts.max_model_len,
        kv_cache_tokens=parts.kv.num_blocks * parts.kv.block_size,
    )


def calibration_file(parts: "EngineParts") -> CalibrationFile:
    """Where their measurements are kept."""
    about = {
        "model": parts.config.model.model,
        "spec": hashlib.sha256(msgspec.json.encode(parts.spec)).hexdigest(),
        "dtype": str(parts.model.dtype),
        "quantization": str(parts.config.model.quantization),
        "kernels": parts.kernels,
        "kv cache": str(parts.cache.kept_dtype).removeprefix("torch."),
        "device": _device_name(parts.model.device),
        "ranks": str(parts.config.model.tensor_parallel_size),
        "threads": str(torch.get_num_threads()),
        "block size": str(parts.kv.block_size),
        "max running": str(parts.config.scheduler.max_num_seqs),
        "drafts": _measured_drafts(parts.config.scheduler),
        "versions": f"legato {__version__}, torch {torch.__version__}",
    }
    return CalibrationFile(parts.config.calibration.calibration_dir, about)


def _measured_drafts(config: SchedulerConfig) -> str:
    return "none" if config.speculative == "off" else f"up to {MOST_DRAFTS} a stream"


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.node()} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
