"""Judges whether other programs disturbed a calibration."""

import msgspec
import numpy as np

from legato.core.rows import RowCounts
from legato.scheduler.cost_fit import MOST_DISTURBED, MeasuredStep, disturbed, fit, relative_errors

MOST_ERROR = 0.25
"""Largest relative error of 95 % of the steps."""
MOST_WAITED = 0.1


class Quality(msgspec.Struct, frozen=True, kw_only=True):
    """How far the steps of a calibration can be trusted.

    Attributes:
        median_error, p95_error: relative errors of the predictions for these same steps.
        disturbed: share of the steps that took far longer than similar steps.
        waited: seconds per second that threads of the process waited for a core; see `CoreWait`.
            Another program may make all steps longer alike, which no error shows.
    """

    median_error: float
    p95_error: float
    disturbed: float
    waited: float

    @classmethod
    def of(cls, steps: list[MeasuredStep], rows: RowCounts, waited: float) -> "Quality":
        costs = fit(steps, rows)
        errors = relative_errors(steps, costs)
        return cls(
            median_error=float(np.median(errors)),
            p95_error=float(np.quantile(errors, 0.95)),
            disturbed=disturbed(steps, costs),
            waited=waited,
        )

    @property
    def doubt(self) -> str:
        """Why the steps are not kept for later starts; empty if they are kept."""
        if self.waited > MOST_WAITED:
            return f"the engine's threads waited for a core {self.waited:.0%} of the time"
        if self.disturbed > MOST_DISTURBED:
            return f"{self.disturbed:.0%} of the steps took far longer than others like them"
        if self.p95_error > MOST_ERROR:
            return f"95 % of the steps are predicted within {self.p95_error:.0%} only"
        return ""
