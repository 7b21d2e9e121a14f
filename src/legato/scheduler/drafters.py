"""The drafters of a scheduler, which follow its streams while its settings ask for drafts."""

from collections.abc import Iterable, Sequence

from legato.core.config import SchedulerConfig
from legato.core.request import Request
from legato.core.step_record import DraftsEndedBy
from legato.scheduler.budget import StepBudget
from legato.scheduler.decodes import Decodes
from legato.scheduler.drafting import Drafting
from legato.scheduler.model_drafting import ModelDrafting
from legato.scheduler.output_lengths import OutputLengths
from legato.scheduler.step import Step
from legato.scheduler.step_time import StepTimeModel
from legato.speculation.drafter import CostlyDrafter, Drafter


class Drafters:
    """Drafters that are turned on and off by `speculative`; off, they do nothing.

    Args:
        drafters: propose drafts.
        draft_model: proposes drafts when it is worth its time.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        draft_model: CostlyDrafter | None,
        step_time: StepTimeModel,
        lengths: OutputLengths,
    ) -> None:
        self._drafters = drafters
        self._draft_model = draft_model
        self._step_time = step_time
        self._lengths = lengths
        self._drafting: Drafting | None = None  # None while they are off

    def configure(
        self, config: SchedulerConfig, budget: StepBudget, requests: Iterable[Request] = ()
    ) -> None:
        """Draft by other settings.

        Args:
            requests: all of the scheduler's, preempted ones included. Drafters that are turned on
                learn their tokens, and drafters that are turned off forget them.
        """
        was_on = self._drafting is not None
        self._drafting = self._make_drafting(config, budget)
        for request in requests:
            if self._drafting is None:
                self.forget(request)
            elif not was_on and request.num_output_tokens:
                self._drafting.advance(request)

    def draft(self, step: Step, decodes: Decodes) -> DraftsEndedBy | None:
        """Add drafts to the streams of a step; return the limit on their number."""
        return None if self._drafting is None else self._drafting.add(step, decodes)

    def advance(self, request: Request) -> None:
        """Learn a request's new tokens."""
        if self._drafting is not None:
            self._drafting.advance(request)

    def record_turnaround(self, seconds: float) -> None:
        """See `Scheduler.record_turnaround`."""
        if self._drafting is not None:
            self._drafting.record_turnaround(seconds)

    def forget(self, request: Request) -> None:
        """Forget a request that has ended."""
        for drafter in self._drafters:
            drafter.forget(request)
        if self._draft_model is not None:
            self._draft_model.forget(request)

    def _make_drafting(self, config: SchedulerConfig, budget: StepBudget) -> Drafting | None:
        if config.speculative == "off":
            return None
        model: ModelDrafting | None = None
        if self._draft_model is not None:
            model = ModelDrafting(self._draft_model, config, self._step_time, self._lengths)
        return Drafting(self._drafters, config, budget, self._step_time, model)
