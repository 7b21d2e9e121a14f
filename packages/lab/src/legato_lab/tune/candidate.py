"""A configuration of the scheduler, and the space of configurations to try."""

from typing import Any, Literal

import msgspec
import optuna

from legato.core.config import Policy, PrefillOrder, SchedulerConfig, Speculative
from legato.core.errors import ConfigError
from legato.core.slo import P99, SloClass

Steps = Literal["slo", "fixed", "prefill-first"]

_BUDGETS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_NUM_SEQS = (4, 8, 16, 32, 64, 128, 256)
_PACES = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0)
_ORDERS: tuple[PrefillOrder, ...] = ("slowdown", "fcfs", "edf")


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that tuning chooses.

    Attributes:
        steps: sized by the ITL and TPOT SLOs, by a fixed number of tokens with running streams
            first, or likewise with prompts first.
        pace: fraction of the ITL and TPOT SLOs that the scheduler is set to; the rest is a margin.
            1 if steps are not sized by them.
        speculative: None if it is not searched.
    """

    steps: Steps
    max_num_batched_tokens: int
    max_num_seqs: int
    prefill_order: PrefillOrder
    shed_load: bool = False
    pace: float = 1.0
    speculative: Speculative | None = None

    def configure(self, goal: SchedulerConfig) -> SchedulerConfig:
        """Return the scheduler's settings.

        Args:
            goal: the settings that are not searched, with the clients' SLOs.
        """
        pace = self.pace if self.steps == "slo" else None
        return msgspec.structs.replace(
            goal,
            policy="prefill-first" if self.steps == "prefill-first" else "stall-free",
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            prefill_order=self.prefill_order,
            shed_load=self.shed_load,
            speculative=goal.speculative if self.speculative is None else self.speculative,
            itl_slo_s=_scaled(goal.itl_slo_s, pace),
            itl_slo_quantile=P99 if pace is None else goal.itl_slo_quantile,
            tpot_slo_s=_scaled(goal.tpot_slo_s, pace),
            slo_classes={name: _paced(slo, pace) for name, slo in goal.slo_classes.items()},
        )


class Space(msgspec.Struct, frozen=True, kw_only=True):
    """The values to choose from; a single value is fixed."""

    steps: tuple[Steps, ...]
    max_num_batched_tokens: tuple[int, ...]
    max_num_seqs: tuple[int, ...]
    prefill_order: tuple[PrefillOrder, ...]
    shed_load: tuple[bool, ...]
    pace: tuple[float, ...]
    speculative: tuple[Speculative | None, ...] = (None,)

    @classmethod
    def around(
        cls,
        goal: SchedulerConfig,
        given: dict[str, Any],
        max_model_len: int,
        *,
        drafts: bool = False,
    ) -> "Space":
        """Make the space of all settings that affect the promises.

        Args:
            given: settings that are not searched; key a field of `SchedulerConfig`.
            drafts: whether the acceptance of drafts is known.
        """
        by_policy: dict[Policy | None, tuple[Steps, ...]] = {
            "stall-free": ("fixed",),
            "prefill-first": ("prefill-first",),
        }
        steps = by_policy.get(given.get("policy"), ("fixed", "prefill-first"))
        if goal.promises_pace:
            steps = ("slo", *steps)
        budgets = tuple(budget for budget in _BUDGETS if budget <= max_model_len)

        def chosen(name: str, searched: tuple[Any, ...]) -> tuple[Any, ...]:
            return (given[name],) if name in given else searched

        return cls(
            steps=steps,
            max_num_batched_tokens=chosen("max_num_batched_tokens", budgets),
            max_num_seqs=chosen("max_num_seqs", _NUM_SEQS),
            prefill_order=chosen("prefill_order", _ORDERS if goal.promises_ttft else _ORDERS[:3]),
            shed_load=chosen("shed_load", (False, True) if goal.promises_ttft else (False,)),
            pace=_PACES if goal.promises_pace else (1.0,),
            speculative=chosen("speculative", ("off", "auto")) if drafts else (None,),
        )

    @property
    def size(self) -> int:
        """The number of different candidates."""
        num_others = len(self.max_num_batched_tokens) * len(self.max_num_seqs)
        num_others *= len(self.prefill_order) * len(self.shed_load) * len(self.speculative)
        is_paced = "slo" in self.steps
        return num_others * (len(self.steps) - is_paced + is_paced * len(self.pace))

    def suggest(self, trial: optuna.Trial) -> Candidate:
        """Return the next candidate of a study."""
        chosen: dict[str, Any] = {
            name: trial.suggest_categorical(name, getattr(self, name))
            for name in self.__struct_fields__
            if name not in ("pace", "speculative")
        }
        if chosen["steps"] == "slo":
            chosen["pace"] = trial.suggest_categorical("pace", self.pace)
        if len(self.speculative) > 1:
            chosen["speculative"] = trial.suggest_categorical("speculative", self.speculative)
        else:
            (chosen["speculative"],) = self.speculative
        return Candidate(**chosen)


def check_goal(goal: SchedulerConfig) -> None:
    """Raises `ConfigError` if there is no SLO to tune for, or no chunk to size."""
    if not (goal.promises_pace or goal.promises_ttft):
        raise ConfigError("tuning is for SLOs, such as --itl-slo 100ms, but none is set")
    if not goal.enable_chunked_prefill:
        raise ConfigError("tuning sizes chunks, but chunked prefill is off")


def _scaled(seconds: float | None, factor: float | None) -> float | None:
    """Scale to a tenth of a millisecond, as in a flag; None promises nothing."""
    return None if seconds is None or factor is None else round(seconds * factor, 4)


def _paced(slo: SloClass, pace: float | None) -> SloClass:
    return SloClass(
        itl_s=_scaled(slo.itl_s, pace),
        itl_quantile=P99 if pace is None else slo.itl_quantile,
        tpot_s=_scaled(slo.tpot_s, pace),
        ttft_s=slo.ttft_s,
    )
