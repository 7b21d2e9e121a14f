"""What `tests.exact` promises of the kernels that other tests compare outputs of."""

from typing import Any

import pytest

from legato import LLM, SamplingParams
from legato.llm.results import Generation
from tests.exact import EXACT_MODEL, KERNELS
from tests.exactness.logits import natural_tokens

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0, logprobs=0)


def scores(answer: Generation) -> list[tuple[int, float]]:
    entries = answer.outputs[0].logprobs
    assert entries is not None
    return [(entry.token_id, entry.logprob) for entry in entries]


@pytest.mark.skipif(KERNELS is None, reason="there are no native kernels")
@pytest.mark.parametrize(
    "settings",
    [{"max_num_batched_tokens": 7}, {"speculative": 8}],
    ids=["chunks of 7, then cached", "drafts"],
)
def test_no_bit_depends_on_the_rest_of_the_batch(settings: dict[str, Any]) -> None:
    shared = {"num_threads": 1, "max_model_len": 512, "kv_cache_memory_bytes": 2**26}
    prompts: list[Any] = [
        {"prompt_token_ids": natural_tokens(length, skip=37 * length)} for length in (3, 40, 200)
    ]
    alone, mixed = (
        LLM(**EXACT_MODEL, **shared, **more)  # type: ignore[arg-type]
        for more in ({"speculative": "off", "enable_prefix_caching": False}, settings)
    )
    expected = [scores(alone.generate(prompt, PARAMS, use_tqdm=False)[0]) for prompt in prompts]
    for _ in range(2):
        assert [*map(scores, mixed.generate(prompts, PARAMS, use_tqdm=False))] == expected
    assert mixed.stats.num_prefix_cache_hits > 0
