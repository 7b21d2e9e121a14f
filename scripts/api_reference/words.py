"""What the OpenAPI document does not say of endpoints, origins and errors."""

ORIGINS = {
    "Legato": ("slo_class", "tenant", "allow_best_effort"),
    "SGLang": (
        *("no_stop_trim", "return_hidden_states", "separate_reasoning", "stream_reasoning"),
        *("regex", "ebnf", "rid", "session_id", "enable_thinking"),
    ),
    "llama.cpp": ("grammar", "json_schema", "cache_prompt", "id_slot", "timings_per_token"),
}
"""Key who defined fields that neither OpenAI nor vLLM has; value their names."""

DEFINED_BY = {
    "OpenAI": "OpenAI",
    "Anthropic": "Anthropic",
    "scores": "vLLM",
    "tokenization": "vLLM",
    "routers": "vLLM, SGLang",
    "probes": "vLLM",
    "trace": "Legato",
    "settings": "Legato",
    "cache": "vLLM",
}
"""Key a tag of the OpenAPI document, value who defined its endpoints."""

CODES = {
    "context_length_exceeded": "prompt and output do not fit into the model's context",
    "unsupported_parameter": "Legato has no such parameter",
    "invalid_api_key": "the key is missing or wrong",
    "admin_key_required": "only an `--admin-api-key` may do this",
    "from_this_machine_only": "only clients on the server's machine may do this, without a proxy",
    "host_not_allowed": "the server does not go by the name in `Host`; see `--allowed-host`",
    "origin_not_allowed": "a web page of another origin asks; see `--allowed-origins`",
    "thread_unsupported_request": "`thread` of `/v1/messages`",
    "model_not_found": "`model` is not the served one",
    "not_found": "the response, or the item of it, is not stored",
    "previous_response_not_found": "the response that this one is to go on from is not stored",
    "response_in_progress": "the response that this one is to go on from is still being made",
    "item_not_found": "an item that `input` refers to is not stored",
    "request_timeout": "headers or body took too long",
    "slow_reader": "the client read its stream too slowly",
    "trace_conflict": "a trace is running already, or none is",
    "request_too_large": "over `--max-body-size`, as a body or as a stored conversation",
    "headers_too_large": "over `--max-header-size`",
    "unknown_transfer_coding": "`Transfer-Encoding` is not `chunked`",
    "overloaded": "too many requests, bodies or connections, or the TTFT SLO cannot be met",
    "no_token_left": "by what the request asks for, nothing can follow the output so far: a "
    "grammar in a dead end, or too costly to go on with, or settings that forbid every token",
    "request_failed": "this request cannot be computed; others are unharmed",
    "shutting_down": "the server drains",
    "engine_dead": "the engine process died or hung, or is being started again",
    "readers_dead": "the processes that read requests died, and are being started again",
}
"""Key the `code` of an error."""

REFUSED: dict[str, list[dict[str, object]]] = {
    "/v1/chat/completions": [
        {"logit_bais": {}},
        {"tools": [{"type": "web_search"}]},
        {"response_format": {"type": "json_schema"}},
        {"structured_outputs": {"regex": "a+", "json_object": True}},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    ],
    "/v1/completions": [
        {"max_tokens": 0},
        {"stream": True, "echo": True, "logprobs": 1},
    ],
    "/v1/responses": [
        {"background": True, "store": False},
        {"tools": [{"type": "web_search"}], "tool_choice": "required"},
    ],
    "/tokenize": [{"messages": [], "add_special_tokens": True}],
}
"""Key the path; value what is wrong in a request that is otherwise right."""

RIGHT: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/tokenize": {},
}
"""Key the path; value a request that nothing is wrong with, but for what is added."""

BEYOND = {
    "max_body_bytes": "413",
    "max_header_bytes": "431",
    "max_completions": "400",
    "max_unread_tokens": "the stream ends",
    "max_stored_responses": "the tenant with most loses its least recently used one",
    "max_stored_bytes": "the tenant with most loses its least recently used one",
    "max_connections": "503 with `Retry-After`",
    "timeout_keep_alive_s": "the connection ends",
    "timeout_header_s": "408",
    "timeout_body_s": "408",
    "timeout_write_s": "the connection ends",
    "timeout_prompt_s": "400",
}
"""Key a setting that limits clients; value what happens to one that exceeds it."""
