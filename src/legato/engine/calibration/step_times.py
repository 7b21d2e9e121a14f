"""Step times at a start: read from disk, or measured and kept for later starts.

A measurement that other programs disturbed is used, but not kept: the next start measures again,
and so does this engine while it is idle.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from legato.core.config import EngineConfig, SchedulerConfig
from legato.core.rows import RowCounts
from legato.engine.calibration.calibration import ON_A_CPU, SHORTEST_CHUNK, Calibration, Extent
from legato.engine.calibration.calibration_file import CalibrationFile, Measurements, shape_counts
from legato.engine.calibration.disturbance import CoreWait, Quality
from legato.engine.calibration.recalibration import Recalibration
from legato.executor.executor import Executor
from legato.kv.manager import BorrowedBlocks, KVCacheManager
from legato.scheduler.cost_fit import MeasuredStep
from legato.scheduler.margin import Tails
from legato.scheduler.step_time import StepTimeModel

logger = logging.getLogger(__name__)

_LONGEST_IDLE_STEP_S = 0.2
"""Longest step of a calibration in an idle engine: a request that comes waits for it."""


@dataclass(frozen=True)
class KnownSteps:
    """Measured steps.

    Attributes:
        quality: None if they were read from disk, or there are none.
        tails: what earlier runs learned for the margin; None if nothing.
    """

    steps: list[MeasuredStep]
    quality: Quality | None = None
    tails: Tails | None = None

    @property
    def trusted(self) -> list[MeasuredStep]:
        """The steps, if they are enough to tell what usual steps cost; else none."""
        return [] if self.quality is not None and self.quality.gap else self.steps

    @property
    def is_doubtful(self) -> bool:
        return self.quality is not None and bool(self.quality.doubt)


class StepTimes:
    """Reads, measures and keeps the step times of one loaded model.

    Args:
        config: with every "auto" replaced.
        measured_on: all that step times depend on, apart from the sizes given here; a part of
            `Measurements.about`.
        device_type: "cpu" or "cuda".
        rows: the numbers of rows to which the executor pads batches.

    Attributes:
        file: keeps the measurements.
    """

    def __init__(
        self,
        executor: Executor,
        kv: KVCacheManager,
        *,
        config: EngineConfig,
        measured_on: dict[str, str],
        device_type: str,
        rows: RowCounts,
        max_model_len: int,
        vocab_size: int,
    ) -> None:
        self._extent = _extent(device_type, config.scheduler)
        num_tokens = min(max_model_len, kv.num_blocks * kv.block_size, self._extent.longest_context)
        # Only roughly: a cache that is made to fit the memory has another size at each start.
        about = measured_on | {"context": f"at least {1 << num_tokens.bit_length() - 1} tokens"}
        self.file = CalibrationFile(config.calibration.calibration_dir, about)
        self._on_disk: Measurements | None = None  # what the step-time model began with
        self._executor = executor
        self._kv = kv
        self._scheduler = config.scheduler
        self._calibrates = config.calibration.calibrate
        self._rows = rows
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size

    def known(self) -> KnownSteps:
        """Return what was measured for the step-time model; no steps if no promise needs it."""
        has_promise = self._scheduler.promises_pace or self._scheduler.promises_ttft
        kept = self.file.load() if has_promise or self._scheduler.bounds_gaps else None
        if kept is not None:
            self._on_disk = kept
            return KnownSteps(kept.measured_steps, tails=kept.tails)
        measures = has_promise and self._calibrates
        return self.measure(self.calibration()) if measures else KnownSteps([])

    def measure(self, calibration: Calibration) -> KnownSteps:
        """Run a calibration, and keep it for later starts unless it is in doubt."""
        # Local import: a start with measurements on disk does not need it.
        from rich.console import Console
        from rich.progress import Progress

        wait = CoreWait()
        with Progress(console=Console(stderr=True), transient=True) as progress:
            bar = progress.add_task("Measuring step times", total=1.0)
            steps = calibration.run(lambda share: progress.update(bar, completed=share))
        quality = Quality.of(steps, calibration.rows, wait.share, calibration.gap(steps))
        if quality.doubt:
            logger.warning(
                "measured step times are not %s: %s",
                "used" if quality.gap else "kept for later starts",
                quality.doubt,
            )
        else:
            self._save(steps)
        return KnownSteps(steps, quality)

    def keep_learned(self, step_time: StepTimeModel) -> None:
        """Keep the margin's tails beside the measurements, if these are kept and were right.

        Measurements that steps in service contradicted are removed: the next start measures again.
        They stay as they are if the machine was slower or faster than them by one factor.
        """
        if step_time.prior_verdict == "wrong":
            if self._on_disk is not None:
                self.file.remove(self._on_disk)
        elif not step_time.prior_verdict:
            self.file.keep_tails(step_time.tails)

    def recalibration(self, step_time: StepTimeModel, known: KnownSteps) -> Recalibration | None:
        """Make a recalibration, for this step-time model and for later starts.

        It measures if the known steps are in doubt, or once steps in service contradict them. None
        if nothing is to be measured.
        """
        if not (self._calibrates and known.steps):
            return None

        def is_needed() -> bool:
            return known.is_doubtful or step_time.prior_verdict == "wrong"

        def keep(steps: list[MeasuredStep]) -> None:
            step_time.begin_again(steps)
            self._save(steps)

        def begin(borrowed: BorrowedBlocks) -> Calibration:
            return self.calibration(borrowed, _LONGEST_IDLE_STEP_S)

        return Recalibration(self._kv, begin, keep, is_needed=is_needed)

    def _save(self, steps: Sequence[MeasuredStep]) -> None:
        self._on_disk = self.measurements(steps)
        self.file.save(self._on_disk)

    def calibration(
        self, borrowed: BorrowedBlocks | None = None, longest_step_s: float = 0.5
    ) -> Calibration:
        """Make a calibration in these blocks. Args: borrowed: None for all blocks."""
        sizes = self._kv.group_sizes
        block_ids: Sequence[int] = range(sizes[0]) if borrowed is None else borrowed.block_ids
        windows: Sequence[Sequence[int]] = (
            [range(count) for count in sizes[1:]] if borrowed is None else borrowed.windows
        )
        max_num_seqs = self._scheduler.max_num_seqs
        assert max_num_seqs is not None
        return Calibration(
            self._executor,
            block_ids=block_ids,
            window_block_ids=windows,
            states=() if self._kv.states is None else self._kv.states.borrow(max_num_seqs),
            block_size=self._kv.block_size,
            max_model_len=self._max_model_len,
            max_num_seqs=max_num_seqs,
            vocab_size=self._vocab_size,
            most_drafts=self._scheduler.most_samples - max_num_seqs,
            rows=self._rows,
            extent=self._extent,
            longest_step_s=longest_step_s,
        )

    def measurements(self, steps: Sequence[MeasuredStep]) -> Measurements:
        """Return these steps, and what they were measured on."""
        return Measurements(
            figures="measured",
            about=self.file.about,
            steps=[(shape_counts(shape), seconds) for shape, seconds in steps],
            rows=self._rows,
            max_model_len=self._max_model_len,
            kv_cache_tokens=self._kv.num_blocks * self._kv.block_size,
        )


def _extent(device_type: str, config: SchedulerConfig) -> Extent:
    if device_type == "cpu":
        return ON_A_CPU
    assert config.max_num_batched_tokens is not None
    # Memory is allocated for steps within the budget only.
    longest_chunk = min(4096, max(config.max_num_batched_tokens, SHORTEST_CHUNK))
    return Extent(longest_chunk, 32_768, reads_unwritten=True)
