"""How well does the step-time model predict the steps of a real mixed workload?

    python -m benchmarks.step_time [--itl-slo 100ms] [--seconds 60] [--out out]

Chat-like requests with some long prompts arrive at random and are served by the real model. Each
step is predicted before it runs and learned from after, so every prediction is of a step that the
model has not seen. Prints the error and plots predicted against measured durations.
"""

import argparse
import random
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from rich.console import Console
from rich.progress import Progress

from legato.cli.values import duration_s
from legato.core.config import EngineConfig, SchedulerConfig
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.token_ids import token_array
from legato.engine.assembly.builder import build_engine
from legato.scheduler.step_shape import StepShape
from legato.scheduler.step_time import StepTimeModel

_RATE_PER_S = 1.0
_LONG_SHARE = 0.15


class Predictions:
    """Listens to a model: what it said of each step, and what came of it."""

    def __init__(self, model: StepTimeModel) -> None:
        self._observe = model.observe
        self._model = model
        self.predicted_s: list[float] = []
        self.measured_s: list[float] = []
        self.has_prefill: list[bool] = []
        self.has_drafts: list[bool] = []
        model.observe = self.observe  # type: ignore[method-assign]

    def observe(self, shape: StepShape, seconds: float, *others: float | None) -> None:
        self.predicted_s.append(self._model.seconds(shape))
        self.measured_s.append(seconds)
        self.has_prefill.append(shape.num_prefill_chunks > 0)
        self.has_drafts.append(shape.num_draft_rows > 0)
        self._observe(shape, seconds, *others)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--itl-slo", type=duration_s, default=0.1, metavar="TIME")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=Path("out"))
    arguments = parser.parse_args()
    scheduler_config = SchedulerConfig(itl_slo_s=arguments.itl_slo)
    core, _ = build_engine(EngineConfig(scheduler=scheduler_config))
    predictions = Predictions(core._scheduler._step_time)
    rng = random.Random(0)
    started_s = time.monotonic()
    arrival_s, count = started_s, 0
    with Progress(transient=True) as progress:
        bar = progress.add_task("Serving", total=arguments.seconds)
        while (elapsed_s := time.monotonic() - started_s) < arguments.seconds:
            progress.update(bar, completed=elapsed_s)
            if time.monotonic() >= arrival_s:
                core.apply([_request(f"r{count}", rng)])
                arrival_s += rng.expovariate(_RATE_PER_S)
                count += 1
            if core.has_work:
                core.step()
            else:
                time.sleep(0.005)
    _report(predictions, arguments.out)


def _request(request_id: str, rng: random.Random) -> AddRequest:
    is_long = rng.random() < _LONG_SHARE
    length = rng.randint(2000, 7000) if is_long else min(1500, int(rng.lognormvariate(5.3, 0.8)))
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=token_array(rng.choices(range(1000, 32_000), k=max(8, length))),
        params=SamplingParams(max_tokens=rng.randint(5, 150), temperature=0.0, seed=0),
        arrival_time_s=time.monotonic(),
    )


def _report(predictions: Predictions, out: Path) -> None:
    predicted_s, measured_s = np.array(predictions.predicted_s), np.array(predictions.measured_s)
    has_prefill, has_drafts = np.array(predictions.has_prefill), np.array(predictions.has_drafts)
    only_decodes = ~(has_prefill | has_drafts)
    console = Console(highlight=False)
    for name, chosen in (
        ("all", np.full(len(has_prefill), True)),
        ("with prefill", has_prefill),
        ("with drafts", has_drafts),
        ("decodes only", only_decodes),
    ):
        errors = np.abs(measured_s[chosen] / predicted_s[chosen] - 1.0)
        if len(errors):
            p50, p95, p99 = np.quantile(errors, [0.5, 0.95, 0.99])
            console.print(
                f"{name}: {len(errors)} steps, relative error p50 {p50:.1%}, p95 {p95:.1%}, "
                f"p99 {p99:.1%}"
            )
    out.mkdir(parents=True, exist_ok=True)
    figure, axis = plt.subplots(figsize=(5, 5))
    for chosen, label in (
        (has_prefill, "with prefill"),
        (has_drafts & ~has_prefill, "with drafts"),
        (only_decodes, "decodes only"),
    ):
        axis.plot(1e3 * measured_s[chosen], 1e3 * predicted_s[chosen], ".", ms=3, label=label)
    axis.axline((30, 30), slope=1, color="grey", linewidth=0.8)
    axis.set(xscale="log", yscale="log", xlabel="measured, ms", ylabel="predicted, ms")
    axis.legend()
    figure.savefig(out / "step_time.png", dpi=120, bbox_inches="tight")
    console.print(f"plotted to {out}/step_time.png")


if __name__ == "__main__":
    main()
