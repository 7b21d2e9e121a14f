import inspect

import legato


def test_the_public_names_are_these() -> None:
    assert legato.__all__ == ["LLM", "SamplingParams", "__version__"]
    for name in legato.__all__:
        assert getattr(legato, name) is not None


def test_the_methods_of_llm_are_these() -> None:
    public = [name for name in vars(legato.LLM) if not name.startswith("_")]
    assert sorted(public) == [
        "chat",
        "from_config",
        "generate",
        "get_default_sampling_params",
        "stats",
        "stream_chat",
    ]
    assert list(inspect.signature(legato.LLM).parameters) == [
        "model",
        "revision",
        "dtype",
        "device",
        "max_model_len",
        "block_size",
        "kv_cache_memory_bytes",
        "gpu_memory_utilization",
        "enable_prefix_caching",
        "swap_space_bytes",
        "max_num_batched_tokens",
        "max_num_seqs",
        "enable_chunked_prefill",
        "policy",
        "admission_optimism",
        "num_threads",
        "quantization",
        "kernels",
    ]
