"""Why each of llama.cpp's tests that fails does so, as in `failures.py`."""

from benchmarks.peer_tests.failures import Pattern

LLAMA_CPP_REASONS: tuple[Pattern, ...] = (
    # What its own server is.
    ("test_chat_completion\\[", "startswith", "test", "its fingerprint begins with b"),
    ("", "fingerprint|'legato-", "test", "its fingerprint begins with b"),
    ("cached_tokens", "== 77", "test", "it counts the tokens of its own model's template"),
    ("", "^AssertionError: assert '.*' is None", "test", "its first chunk has a role alone"),
    ("test_logprobs_stream", "is None", "test", "its first chunk has a role alone"),
    ("context_size_exceeded", "200|Should have", "test", "its server has a small context"),
    ("", "400 == 500", "test", "it expects 500 where an image is refused"),
    ("STREAMED", "non empty content delta", "test", "its first chunk has no empty content"),
    ("", "huggingface.co", "test", "it needs an image of the hub's"),
    ("thinking_history_in_count", "", "test", "its template shows the thinking of old turns"),
    ("test_completion_with_response_format", "400", "test", "its json_schema has no name"),
    ("invalid_chat_completion_req", "200 == 400", "test", "it refuses two answers at the end"),
    ("", "Template file", "test", "it needs a template of llama.cpp's repository"),
    # Features.
    ("", "__verbose", "not offered", "__verbose, llama.cpp's own words on an answer"),
    ("test_verbose_debug", "", "not offered", "__verbose, llama.cpp's own words on an answer"),
    ("test_apply_chat_template", "404", "not offered", "/apply-template, llama.cpp's own endpoint"),
    ("", "apply-template", "not offered", "/apply-template, llama.cpp's own endpoint"),
    ("", "return_progress", "not offered", "return_progress"),
    ("test_chat_completions_token_count", "404", "not offered", "/chat/completions/input_tokens"),
    ("test_logit_bias", "400", "not offered", "biases of texts, and of -inf as false"),
    ("test_anthropic_empty_messages", "", "not offered", "conversations without messages"),
    ("timings", "", "not offered", "timings, llama.cpp's own"),
    # The default model's doing.
    ("thinking_with_reasoning_model", "", "model", "it does not reason"),
    ("", "match_regex|Expected .*, got ", "model", "its answer is another"),
    ("", "Timeout", "model", "a model of 135 million parameters goes on to the end of its context"),
)
