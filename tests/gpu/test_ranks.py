"""A model that is divided among GPUs, which are threads with a twin each."""

from pathlib import Path

import pytest
from transformers import FalconH1Config

from legato.core.errors import ConfigError
from legato.engine.loop.engine_loop import EngineLoop
from legato.gpu import device
from tests.engine.rank_threads import ranks_are_threads
from tests.gpu.executors import request
from tests.gpu.host_twin import on_the_twin
from tests.gpu.test_end_to_end import CONFIGS, SMALL
from tests.gpu.test_startup import engine_of, put_on_a_gpu
from tests.model.conftest import SaveTiny, save_tiny

__all__ = ["ranks_are_threads", "save_tiny"]

pytestmark = on_the_twin

FIRST_OF_RANK_1 = 49
"""Token of 97."""


def engine_on_gpus(folder: Path, names: list[str], monkeypatch: pytest.MonkeyPatch) -> EngineLoop:
    monkeypatch.setattr(device, "gpu_names", lambda: names)
    put_on_a_gpu(monkeypatch)
    engine, info = engine_of(folder, tensor_parallel_size=2)
    assert info.settings["ranks"] == "2"
    assert info.settings["kernels"] == "triton"
    return engine


def outputs_of(engine: EngineLoop) -> dict[str, tuple[list[int], list[float]]]:
    """Tokens, which are drawn so that any other embedding gives others; and log probabilities."""
    events = [
        request("plain", [5, 20, 45, 80, 1, 2, 9], max_tokens=5, temperature=2.0, seed=5),
        request("scored", [7, 96, 8], max_tokens=2, prompt_logprobs=0, temperature=1.0, seed=3),
    ]
    found: dict[str, tuple[list[int], list[float]]] = {e.request_id: ([], []) for e in events}
    outputs = engine.step(events)
    while outputs or engine.has_work:
        for output in outputs:
            tokens, scores = found[output.request_id]
            tokens += output.new_token_ids
            scores += [entry.logprob for entry in output.prompt_logprobs or ()]
        outputs = engine.step()
    return found


@pytest.mark.usefixtures("ranks_are_threads")
def test_two_generate_what_a_cpu_does(save_tiny: SaveTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks and from graphs, two steps in flight.

    The layer is attention beside Mamba-2, and ranks share the norm of its group.
    """
    config = FalconH1Config(
        **{**SMALL, "num_hidden_layers": 1},
        num_attention_heads=4,
        num_key_value_heads=2,
        mamba_d_ssm=96,
        mamba_n_heads=6,
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_rms_norm=True,
    )
    folder, _ = save_tiny(config)
    expected = outputs_of(engine_of(folder, device="cpu")[0])
    read_on_the_device = [token for tokens, _ in expected.values() for token in tokens[:-1]]
    assert max(read_on_the_device) >= FIRST_OF_RANK_1, "rank 1 embeds what rank 0 samples"
    found = outputs_of(engine_on_gpus(folder, ["twin", "twin"], monkeypatch))
    for name, (tokens, scores) in expected.items():
        assert found[name][0] == tokens, name
        assert found[name][1] == pytest.approx(scores, abs=1e-4), name
    assert len(expected["scored"][1]) == 2


@pytest.mark.parametrize(
    ("names", "reason"),
    [(["one"], "needs as many GPUs, and torch sees 1"), (["one", "other"], "of one kind")],
)
def test_gpus_that_are_too_few_or_differ_are_refused(
    names: list[str], reason: str, save_tiny: SaveTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=reason):
        engine_on_gpus(save_tiny(CONFIGS["llama"])[0], names, monkeypatch)
