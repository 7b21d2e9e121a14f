"""A cache of 8 bits under the whole engine: prefix hits and preemption change no token."""

from legato import LLM, SamplingParams

SETTINGS = {"kv_cache_dtype": "int8", "max_model_len": 256, "quantization": "none"}
BLOCK_BYTES = 32 * 2 * 30 * 3 * (64 + 4)
GREEDY = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
PROMPTS = [
    f"{topic} is a subject of which much can be told, and which nobody ever knew all about. In the "
    f"beginning of what is to be said of {topic.lower()}, one has to say that"
    for topic in ("The sea", "Music", "A mountain", "Rain")
]


def generate(llm: LLM, prompts: list[str]) -> list[list[int]]:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_hits_and_preemption_change_no_token() -> None:
    llm = LLM(kv_cache_memory_bytes=64 * BLOCK_BYTES, **SETTINGS)  # type: ignore[arg-type]
    alone = [generate(llm, [prompt])[0] for prompt in PROMPTS]
    assert generate(llm, PROMPTS) == alone
    # 9 blocks; each stream comes to want 3.
    cramped = LLM(
        kv_cache_memory_bytes=9 * BLOCK_BYTES,
        admission_optimism=1.0,
        **SETTINGS,  # type: ignore[arg-type]
    )
    assert generate(cramped, PROMPTS) == alone
