"""What the OpenAPI document does not say of endpoints, origins and errors."""

ORIGINS = {
    "Legato": ("slo_class", "tenant", "allow_best_effort"),
    "SGLang": (
        *("no_stop_trim", "return_hidden_states", "separate_reasoning", "stream_reasoning"),
        *("regex", "ebnf", "rid", "session_id", "enable_thinking"),
    ),
    "llama.cpp": (
        *("grammar", "json_schema", "cache_prompt", "id_slot", "timings_per_token"),
        "return_progress",
    ),
}
"""Key who defined fields that neither OpenAI nor vLLM has; value their names."""

DEFINED_BY = {
    "OpenAI": "OpenAI",
    "Anthropic": "Anthropic",
    "Ollama": "Ollama",
    "llama-server": "llama.cpp",
    "scores": "vLLM",
    "tokenization": "vLLM",
    "routers": "vLLM, SGLang",
    "probes": "vLLM",
    "trace": "Legato",
    "settings": "Legato",
    "cache": "vLLM",
}
"""Key a tag of the OpenAPI document, value who defined its endpoints."""

ERRORS: dict[int, dict[str, str]] = {
    400: {
        "": "malformed, invalid or unsupported",
        "unsupported_parameter": "Legato has no such parameter",
        "context_length_exceeded": "prompt and output do not fit into the model's context",
        "no_token_left": "grammar or settings allow no further token",
        "previous_response_not_found": "the response to continue is not stored",
        "response_in_progress": "the response to continue is not complete",
        "request_too_large": "a stored conversation over `--max-body-size`",
        "item_not_found": "an item that `input` refers to is not stored",
        "thread_unsupported_request": "`thread` of `/v1/messages`",
    },
    401: {"invalid_api_key": "missing or wrong", "admin_key_required": "no key was sent"},
    403: {
        "admin_key_required": "the key is not an `--admin-api-key`",
        "from_this_machine_only": "for clients on the server's machine, without a proxy",
        "host_not_allowed": "`Host` is not the server's; see `--allowed-host`",
        "origin_not_allowed": "a web page of another origin; see `--allowed-origins`",
    },
    404: {
        "": "no such path",
        "model_not_found": "`model` is not the served one",
        "not_found": "the response or its item is not stored",
    },
    408: {
        "request_timeout": "headers or body took too long",
        "slow_reader": "the client read its stream too slowly",
    },
    409: {"trace_conflict": "a trace is running already, or none is"},
    413: {"request_too_large": "a body over `--max-body-size`"},
    429: {"overloaded": "too many requests or large bodies, or the TTFT SLO cannot be met"},
    431: {"headers_too_large": "over `--max-header-size`"},
    500: {"request_failed": "this request cannot be computed; other requests go on"},
    501: {"unknown_transfer_coding": "`Transfer-Encoding` is not `chunked`"},
    503: {
        "overloaded": "over `--max-connections`",
        "loading": "the model is loading",
        "shutting_down": "the server drains",
        "engine_dead": "the engine process died or hung, and starts again",
        "readers_dead": "the processes that read requests died, and start again",
    },
}
"""Key a status, then the `code` of an error, empty for an error without one."""

BEYOND = {
    "max_body_bytes": "413",
    "max_header_bytes": "431",
    "max_completions": "400",
    "default_max_tokens": "the answer ends with `length`",
    "max_output_tokens": "the same",
    "reasoning_budget": "the answer begins",
    "max_reasoning_budget": "the same",
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
