"""Measures step times again while a server is idle, until no other program disturbs it.

It uses empty blocks of the cache. If cached prompts fill the cache, the step-time model has learned
enough from the steps that computed them.
"""

import logging
import time
from collections.abc import Callable, Iterator

from legato.engine.calibration.calibration import Calibration
from legato.engine.calibration.disturbance import MOST_WAITED, CoreWait, Quality
from legato.kv.manager import BorrowedBlocks, KVCacheManager
from legato.scheduler.cost_fit import MeasuredStep

logger = logging.getLogger(__name__)

_QUIET_S = 5.0
"""Time without a request before the first step is measured."""
_PAUSE_S, _LONGEST_PAUSE_S = 60.0, 3600.0
"""Time between two attempts; it doubles after each attempt that another program disturbed."""
_FIRST_LOOK_S = 1.0
"""Time after which an attempt ends if another program disturbs it."""
_FEWEST_TOKENS, _MOST_TOKENS = 1024, 8192


class _Attempt:
    """A running calibration."""

    def __init__(self, calibration: Calibration, started_s: float) -> None:
        self.calibration = calibration
        self.started_s = started_s
        self.measured: list[MeasuredStep] = []
        self.wait = CoreWait()
        self._steps: Iterator[MeasuredStep] = calibration.steps()

    def measure(self) -> bool:
        """Measure one more step; return False after the last one."""
        step = next(self._steps, None)
        if step is not None:
            self.measured.append(step)
        return step is not None


class Recalibration:
    """Repeats calibrations step by step, so that a new request waits for one step at most.

    Args:
        begin: makes a calibration in the given blocks.
        keep: called once, with the steps of an undisturbed calibration.
        clock: returns seconds.
        is_needed: whether to measure again. It is asked before each attempt.

    An error of `postpone` or `go_on` ends it, once the caller has called `abandon`.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        begin: Callable[[BorrowedBlocks], Calibration],
        keep: Callable[[list[MeasuredStep]], None],
        clock: Callable[[], float] = time.monotonic,
        is_needed: Callable[[], bool] = lambda: True,
    ) -> None:
        self._kv = kv
        self._begin = begin
        self._keep = keep
        self._clock = clock
        self._is_needed = is_needed
        self._next_s = clock() + _QUIET_S
        self._pause_s = _PAUSE_S
        self._attempt: _Attempt | None = None
        self._borrowed: BorrowedBlocks | None = None
        self.is_done = False

    @property
    def wait_s(self) -> float | None:
        """Seconds until the next step is due; None if there is none."""
        if self._attempt is not None:
            return 0.0
        if self.is_done or not self._is_needed():
            return None
        return max(0.0, self._next_s - self._clock())

    def postpone(self) -> None:
        """Give up a running attempt, because there is work for requests."""
        if self._attempt is not None:
            self._end(self._attempt)
            self._next_s = self._clock() + self._pause_s
        self._next_s = max(self._next_s, self._clock() + _QUIET_S)

    def go_on(self) -> None:
        """Measure one step if it is due; call `abandon` if it raises."""
        if self._attempt is None:
            if self.wait_s == 0.0:
                self._start()
            return
        attempt = self._attempt
        has_more = attempt.measure()
        looks = self._clock() - attempt.started_s > _FIRST_LOOK_S
        if not has_more:
            self._judge(attempt)
        elif looks and attempt.wait.share > MOST_WAITED:
            self._give_up(attempt)

    def abandon(self, _: Exception) -> None:
        """Give the blocks of a failed attempt back, and make no further attempt."""
        self.is_done = True
        self._attempt = None
        self._give_back()

    def _start(self) -> None:
        borrowed = self._kv.borrow(
            fewest=-(-_FEWEST_TOKENS // self._kv.block_size),
            most=-(-_MOST_TOKENS // self._kv.block_size),
        )
        self._next_s = self._clock() + self._pause_s
        if borrowed is not None:
            self._borrowed = borrowed
            self._attempt = _Attempt(self._begin(borrowed), self._clock())

    def _judge(self, attempt: _Attempt) -> None:
        measured, calibration = attempt.measured, attempt.calibration
        gap = calibration.gap(measured)
        quality = Quality.of(measured, calibration.rows, attempt.wait.share, gap)
        if quality.doubt:
            self._give_up(attempt)
            return
        self._end(attempt)
        self._keep(attempt.measured)
        self.is_done = True
        logger.info(
            "step times were measured again, undisturbed: 95 %% of the steps are predicted "
            "within %.0f %%",
            100 * quality.p95_error,
        )

    def _give_up(self, attempt: _Attempt) -> None:
        """End an attempt that another program disturbed."""
        self._end(attempt)
        self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s)
        self._next_s = self._clock() + self._pause_s

    def _end(self, attempt: _Attempt) -> None:
        attempt.calibration.forget()
        self._attempt = None
        self._give_back()

    def _give_back(self) -> None:
        if self._borrowed is not None:
            self._kv.give_back(self._borrowed)
            self._borrowed = None
