"""What the OpenAPI document does not say of fields; those of `SamplingParams` have it there."""

FIELDS = {
    # Of both kinds of completions.
    "model": "the served model's name",
    "stream": "answer with server-sent events",
    "stream_options": "with `stream` only",
    "slo_class": "class of service: `interactive` has the server's SLOs, `batch` has none, "
    "`--slo-class` adds others",
    "tenant": "whose the request is; a key that names a tenant allows no other",
    "priority": "among a tenant's requests, lower goes earlier",
    "allow_best_effort": "be served without a promise, rather than be refused, where the TTFT SLO "
    "cannot be met",
    "cache_salt": "cached blocks are shared only among requests with the same salt",
    "prompt_logprobs": "return log probabilities of this many most likely tokens for each prompt "
    "token but the first; not with `stream`",
    "user": "changes nothing",
    "safety_identifier": "changes nothing",
    "metadata": "changes nothing; keys of at most 64 characters, values of 512",
    "service_tier": "changes nothing",
    "prompt_cache_key": "changes nothing: prompts that begin alike share their cache anyway, but "
    "for those with a `cache_salt`",
    "prompt_cache_retention": "changes nothing",
    "prompt_cache_options": "changes nothing",
    "verbosity": "changes nothing",
    "spaces_between_special_tokens": "changes nothing: there are none",
    "store": "answers are not stored",
    "use_beam_search": "there is no beam search",
    "length_penalty": "of beam search, which there is not",
    "early_stopping": "of beam search, which there is not",
    "truncation_side": "the end of a prompt is kept",
    "return_tokens_as_token_ids": "`return_token_ids` returns them beside the text",
    "return_token_ids": "return the tokens of the prompt, `prompt_token_ids`, and of each "
    "completion, `token_ids`; of a stream, the former in its first chunk",
    "documents": "there are none; what a template reads goes into `chat_template_kwargs`",
    "mm_processor_kwargs": "only text is supported",
    "ChatRequest.echo": "the answer does not begin with the last message",
    "suffix": "there is no filling in the middle",
    "response_format": "the form of the output: text, any JSON object, or JSON by a schema",
    "structured_outputs": "the form of the output in vLLM's words, as `StructuredOutputs` in "
    "[Python](api-python.md#structuredoutputs)",
    "guided_json": "an older name of `json` in `structured_outputs`",
    "guided_regex": "an older name of `regex` in it",
    "guided_choice": "an older name of `choice` in it",
    "guided_grammar": "an older name of `grammar` in it",
    # Of one of them.
    "messages": "the conversation",
    "prompt": "a text, token ids, or a list of either; each is completed `n` times",
    "max_tokens": "most tokens to generate; without it, as many as the context holds",
    "CompletionRequest.max_tokens": "most tokens to generate, 16 unless it is sent; 0 with `echo` "
    "scores the prompt alone",
    "max_completion_tokens": "the newer name of `max_tokens`; they must not differ",
    "logprobs": "return log probabilities of the sampled tokens",
    "CompletionRequest.logprobs": "return log probabilities of this many most likely tokens beside "
    "the sampled one",
    "top_logprobs": "and of this many most likely tokens; with `logprobs` only",
    "best_of": "must be 1 or equal `n`",
    "echo": "put the prompt before the completion; with `logprobs`, not with `stream`",
    "add_special_tokens": "the chat template adds them",
    "CompletionRequest.add_special_tokens": "add the tokenizer's special tokens to prompts that "
    "are texts",
    "modalities": "only text is supported",
    "tools": "functions that the model may call; see [tools](tools.md)",
    "tool_choice": '`auto`, `none`, `required`, `{"type": "function", "function": {"name": '
    "...}}`, or OpenAI's `allowed_tools`",
    "parallel_tool_calls": "several calls in one message",
    "functions": "the older name of `tools`; calls are answered as `function_call`",
    "function_call": "the older name of `tool_choice`",
    "reasoning_effort": "for the chat template, where it reads `reasoning_effort` or "
    "`enable_thinking`; refused where it reads neither",
    # Of a chat template.
    "add_generation_prompt": "end the prompt with the beginning of an answer",
    "continue_final_message": "go on with the last message instead of answering it",
    "chat_template": "a Jinja template instead of the model's own; refused unless the server was "
    "started with `--trust-request-chat-template`",
    "chat_template_kwargs": "further variables of the template",
    # Of their objects.
    "StreamOptions.include_usage": "send the token counts in a last chunk, which has no choices",
    "StreamOptions.continuous_usage_stats": "send the token counts so far in every chunk",
    "StreamOptions.include_obfuscation": "random padding is not supported",
    "ResponseFormat.type": "structural_tag is vLLM's",
    "ResponseFormat.json_schema": "goes with that type",
    "ResponseFormat.structures": "tags in their older form; with `triggers`, for a structural tag",
    "ResponseFormat.triggers": "texts with which tags begin",
    "ResponseFormat.format": "tags in their newer form, for a structural tag",
    "JsonSchemaFormat.name": "changes nothing",
    "JsonSchemaFormat.description": "changes nothing",
    "JsonSchemaFormat.schema": "the JSON schema; without it, any object",
    "JsonSchemaFormat.strict": "refuse keywords that are not supported, rather than pass them over",
    "ChatMessage.role": "who says it; `function` is the older name of `tool`",
    "ChatMessage.content": 'a text, or text parts `{"type": "text", "text": "..."}`, which are '
    "joined by line ends",
    "ChatMessage.name": "for the chat template",
    "ChatMessage.tool_call_id": "of the call whose result a `tool` message is",
    "ChatMessage.tool_calls": "the calls of an answer",
    "ChatMessage.function_call": "the older form of a call",
    "ChatMessage.reasoning_content": "the reasoning of an answer, for the chat template",
    "ChatMessage.reasoning": "vLLM's name of `reasoning_content`",
    "ChatMessage.refusal": "stands for an answer's `content` where that is empty",
    "MessageToolCall.id": "of the call",
    "MessageToolCall.type": "only functions are supported",
    "MessageToolCall.function": "what is called",
    "CalledFunction.name": "of the function",
    "CalledFunction.arguments": "a JSON text, or an object",
    "Tool.type": "only functions are supported",
    "Tool.function": "what can be called",
    "FunctionDefinition.name": "letters, digits, `_`, `.` and `-`",
    "FunctionDefinition.description": "for the chat template",
    "FunctionDefinition.parameters": "a JSON schema of the arguments; without one there are none",
    "FunctionDefinition.strict": "hold every call to the schema, and refuse one that cannot be "
    "held to; calls that are required are held to it anyway",
    # Of the other endpoints.
    "TokenizeRequest.prompt": "a text; either this or `messages`",
    "TokenizeRequest.messages": "a conversation, which the chat template makes a prompt of",
    "TokenizeRequest.add_special_tokens": "add the tokenizer's special tokens to `prompt`, as it "
    "does unless this is `false`",
    "return_token_strs": "return the vocabulary's spelling of each token, too",
    "tokens": "token ids",
    "format": "lines of JSON, or what the Perfetto UI opens",
    "policy": "who goes first in a step",
    "max_num_batched_tokens": "token budget of a step",
    "enable_chunked_prefill": "compute long prompts in chunks",
    "prefill_order": "whose prompt goes first",
    "itl_slo_s": "longest time from one token to the next, in seconds",
    "itl_slo_quantile": "share of a request's tokens that `itl_slo_s` is for",
    "tpot_slo_s": "longest mean time per output token, in seconds",
    "ttft_slo_s": "longest time to the first token, in seconds",
}
"""Key a field, or one of a schema; value what it is."""

LEGATO = frozenset({"slo_class", "tenant", "allow_best_effort"})
"""Fields that neither OpenAI nor vLLM has."""

DEFINED_BY = {
    "OpenAI": "OpenAI",
    "tokenization": "vLLM",
    "probes": "vLLM",
    "trace": "Legato",
    "settings": "Legato",
}
"""Key a tag of the OpenAPI document, value who defined its endpoints."""

CODES = {
    "context_length_exceeded": "prompt and output do not fit into the model's context",
    "unsupported_parameter": "Legato has no such parameter",
    "invalid_api_key": "the key is missing or wrong",
    "host_not_allowed": "the server does not go by the name in `Host`; see `--allowed-host`",
    "origin_not_allowed": "a web page of another origin asks; see `--allowed-origins`",
    "model_not_found": "`model` is not the served one",
    "request_timeout": "headers or body took too long",
    "slow_reader": "the client read its stream too slowly",
    "trace_conflict": "a trace is running already, or none is",
    "request_too_large": "over `--max-body-size`",
    "headers_too_large": "over `--max-header-size`",
    "overloaded": "too many requests, bodies or connections, or the TTFT SLO cannot be met",
    "request_failed": "this request cannot be computed; others are unharmed",
    "shutting_down": "the server drains",
    "engine_dead": "the engine process died or hung, or is being started again",
    "readers_dead": "the processes that read requests died, and are being started again",
}
"""Key the `code` of an error."""

REFUSED: dict[str, list[dict[str, object]]] = {
    "/v1/chat/completions": [
        {"logit_bais": {}},
        {"prediction": {"type": "content", "content": "Hi"}},
        {"allowed_token_ids": []},
        {"tools": [{"type": "web_search"}]},
        {"tool_choice": "required"},
        {"store": True},
        {"response_format": {"type": "json_schema"}},
        {"structured_outputs": {"regex": "a+", "json_object": True}},
        {"stream_options": {"include_usage": True}},
        {"stream": True, "prompt_logprobs": 1},
        {"top_logprobs": 5},
        {"max_tokens": 5, "max_completion_tokens": 6},
        {"chat_template_kwargs": {"messages": []}},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    ],
    "/v1/completions": [
        {"prompt": []},
        {"max_tokens": 0},
        {"n": 2, "best_of": 3},
        {"use_beam_search": True},
        {"truncate_prompt_tokens": 0},
        {"stream": True, "echo": True, "logprobs": 1},
        {"suffix": "."},
    ],
    "/tokenize": [{}, {"messages": [], "add_special_tokens": True}],
}
"""Key the path; value what is wrong in a request that is otherwise right."""

RIGHT: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/tokenize": {},
}
"""Key the path; value a request that nothing is wrong with, but for what is added."""

BEYOND = {
    "max_body_bytes": "413",
    "max_header_bytes": "431",
    "max_completions": "400",
    "max_unread_tokens": "the stream ends",
    "max_connections": "503 with `Retry-After`",
    "timeout_keep_alive_s": "the connection ends",
    "timeout_header_s": "408",
    "timeout_body_s": "408",
    "timeout_write_s": "the connection ends",
    "timeout_prompt_s": "400",
}
"""Key a setting that limits clients; value what happens to one that exceeds it."""
