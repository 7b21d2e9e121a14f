"""What a client may ask of the server's promises, and what it is told where they cannot be kept."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.api.launch import MODEL, ServerProcess, long_request, running_server

LONG_PROMPT = [1000 + i % 5000 for i in range(1500)]
"""Takes longer than the promise of `hasty` on any machine that runs these tests."""
HASTY = {"slo_class": "hasty"}


def flags(calibration_dir: Path, **slos: str) -> list[str]:
    told = [text for name, value in slos.items() for text in (f"--{name}-slo", value)]
    return [*told, "--calibration-dir", str(calibration_dir)]


@pytest.fixture(scope="module")
def promising(
    tmp_path_factory: pytest.TempPathFactory, calibration_dir: Path
) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("promising")
    classes = ["--slo-class", "gold:itl=500ms:p99.9,ttft=30s", "--slo-class", "cheap:ttft=1000s",
               "--slo-class", "hasty:ttft=50ms"]  # fmt: skip
    slos = flags(calibration_dir, itl="500ms", ttft="60s")
    with running_server(folder, *slos, *classes, "--shed-load") as process:
        yield process


def complete(server: ServerProcess, **extra: object) -> openai.types.Completion:
    return server.openai().completions.create(
        model=MODEL, prompt="Once upon a time", max_tokens=3, extra_body=extra
    )


def complete_long(server: ServerProcess, **extra: object) -> openai.types.Completion:
    return server.openai().completions.create(
        model=MODEL, prompt=LONG_PROMPT, max_tokens=2, extra_body=extra
    )


@pytest.mark.parametrize(
    "extra",
    [{"slo_class": "interactive"}, {"slo_class": "batch"}, {"slo_class": "gold", "priority": -5},
     {"slo_class": "cheap", "priority": 100}, {"allow_best_effort": True}],
)  # fmt: skip
def test_classes_and_priorities(promising: ServerProcess, extra: dict[str, object]) -> None:
    assert complete(promising, **extra).usage.completion_tokens == 3  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("param", "extra"),
    [("slo_class", {"slo_class": "platinum"}), ("priority", {"priority": 101}),
     ("priority", {"priority": "high"}), ("slo_class", {"slo_class": 3}),
     ("allow_best_effort", {"allow_best_effort": "maybe"})],
)  # fmt: skip
def test_nonsense_is_told(promising: ServerProcess, param: str, extra: dict[str, object]) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        complete(promising, **extra)
    assert raised.value.param == param


def test_an_unknown_class_is_told_which_there_are(promising: ServerProcess) -> None:
    with pytest.raises(openai.BadRequestError, match="interactive, batch, gold, cheap, hasty"):
        complete(promising, slo_class="platinum")


def test_what_cannot_be_on_time_is_refused_at_once(promising: ServerProcess) -> None:
    with pytest.raises(openai.RateLimitError) as raised:
        complete_long(promising, **HASTY)
    assert "TTFT SLO of 0.05 s" in str(raised.value)
    assert int(raised.value.response.headers["retry-after"]) >= 1


def test_or_served_without_a_promise(promising: ServerProcess) -> None:
    for extra in ({**HASTY, "allow_best_effort": True}, {"slo_class": "batch"}):
        answer = complete_long(promising, **extra)
        assert answer.choices[0].finish_reason in ("stop", "length")


def test_a_kept_promise_is_healthy(promising: ServerProcess) -> None:
    complete(promising)
    health = promising.http.get("/health").json()
    assert health["status"] == "ok"
    assert 0 < health["margin"] <= 1
    assert promising.metric("slo_unattainable") == 0
    assert promising.metric("step_time_margin") > 0


def test_what_is_promised_is_told_beside_what_was_delivered(promising: ServerProcess) -> None:
    complete(promising, slo_class="gold")
    told = promising.http.get("/health").json()["promises"]
    assert set(told) == {"interactive", "gold"}
    assert (told["gold"]["itl_s"], told["gold"]["quantile"]) == (0.5, 0.999)
    assert told["interactive"]["quantile"] == 0.99
    assert 0 < told["gold"]["delivered_s"] <= 2.0
    assert promising.metric("slo_quantile", slo_class="gold") == 0.999
    assert promising.metric("slo_delivered_seconds", slo_class="gold") > 0


def test_an_slo_that_no_step_can_keep_is_told(tmp_path: Path, calibration_dir: Path) -> None:
    """It still serves, one stream after the other."""
    with running_server(tmp_path, *flags(calibration_dir, itl="1ms")) as server:
        asked = long_request(max_tokens=200)
        with server.http.stream("POST", "/v1/completions", json=asked) as stream:
            events = stream.iter_lines()
            while next(events):
                pass
            server.wait_for_metric("slo_unattainable", 1)
            health = server.http.get("/health")
            assert health.status_code == 200
            assert health.json()["status"] == "degraded"
            assert "1 running streams" in health.json()["reason"]
            assert complete(server).usage.completion_tokens == 3  # type: ignore[union-attr]
        assert "an SLO cannot be kept" in server.log.read_text()


def test_without_calibration_it_learns_as_it_runs(tmp_path: Path) -> None:
    with running_server(tmp_path, *flags(tmp_path, itl="500ms"), "--no-calibrate") as server:
        assert complete(server).usage.completion_tokens == 3  # type: ignore[union-attr]
        assert not list(tmp_path.glob("*.json"))
