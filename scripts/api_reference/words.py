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
    "user": "changes nothing: the client's note; `/v1/responses` repeats it",
    "safety_identifier": "changes nothing: the client's note; `/v1/responses` repeats it",
    "metadata": "changes nothing: the client's notes, which `/v1/responses` repeats; keys of at "
    "most 64 characters, values of 512",
    "service_tier": "changes nothing: `slo_class` and `priority` say how a request is served",
    "prompt_cache_key": "changes nothing: prompts that begin alike share their cache anyway, but "
    "for those with a `cache_salt`",
    "prompt_cache_retention": "changes nothing: blocks stay until others need their memory",
    "prompt_cache_options": "changes nothing: what is cached is found by itself",
    "verbosity": "changes nothing: models here have no such setting; the prompt can say it",
    "spaces_between_special_tokens": "changes nothing: there are none",
    "store": "answers are not stored",
    "use_beam_search": "there is no beam search",
    "length_penalty": "of beam search, which there is not",
    "early_stopping": "of beam search, which there is not",
    "truncation_side": "the end of a prompt is kept",
    "return_tokens_as_token_ids": "name tokens `token_id:5` rather than by their text, where log "
    "probabilities are shown",
    "return_token_ids": "return the tokens of the prompt, `prompt_token_ids`, and of each "
    "completion, `token_ids`; of a stream, the former in its first chunk",
    "kv_transfer_params": "what becomes of the prompt's keys and values between this server and "
    "another; for servers with `--kv-role`, see "
    "[prefill and decode apart](../guides/disaggregate.md)",
    "KVTransferRequest.do_remote_decode": "keep them for another server; the answer's "
    "`kv_transfer_params` say where, not with `stream`",
    "KVTransferRequest.do_remote_prefill": "take them from another server, as its answer says",
    "KVTransferRequest.remote_host": "that server's `--kv-transfer-host`",
    "KVTransferRequest.remote_port": "that server's `--kv-transfer-port`",
    "KVTransferRequest.transfer_id": "what they are kept under; without it, a name is made up",
    "KVTransferRequest.signature": "of whoever has the fleet's key",
    "KVTransferRequest.is_early": "the other server may not have heard of the prompt yet",
    "KVTransferRequest.remote_engine_id": "address and name say it",
    "KVTransferRequest.remote_block_ids": "servers tell them to each other",
    "no_stop_trim": "stop strings are in the text with `include_stop_str_in_output`",
    "return_hidden_states": "they are not returned",
    "include_reasoning": "a message's reasoning is always told",
    "separate_reasoning": "it is apart from the content",
    "stream_reasoning": "it is streamed as it comes",
    "documents": "there are none; what a template reads goes into `chat_template_kwargs`",
    "mm_processor_kwargs": "only text is supported",
    "ChatRequest.echo": "the answer does not begin with the last message",
    "suffix": "there is no filling in the middle",
    "response_format": "the form of the output: text, any JSON object, or JSON by a schema",
    "structured_outputs": "the form of the output in vLLM's words, as `StructuredOutputs` in "
    "[Python](python.md#structuredoutputs)",
    "guided_json": "an older name of `json` in `structured_outputs`",
    "guided_regex": "an older name of `regex` in it",
    "guided_choice": "an older name of `choice` in it",
    "guided_grammar": "an older name of `grammar` in it",
    "regex": "SGLang's name of `regex` in it",
    "ebnf": "SGLang's name of `grammar` in it",
    "grammar": "llama.cpp's name of `grammar` in it",
    "json_schema": "llama.cpp's name of `json` in it",
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
    # Of embeddings.
    "EmbeddingRequest.input": "a text, token ids, or a list of either; each gets a vector",
    "encoding_format": "a vector is a list of numbers, or base64 of its float32 numbers in "
    "little-endian order",
    "dimensions": "return the first so many numbers of each vector",
    "normalize": "divide each vector by its L2 norm, after `dimensions`",
    **{
        f"{request}.{name}": words
        for request in ("EmbeddingRequest", "RerankRequest", "ScoreRequest")
        for name, words in (
            ("add_special_tokens", "put the tokenizer's special tokens around each text"),
            (
                "truncate_prompt_tokens",
                "keep so many tokens of each prompt at most, special tokens around a text "
                "included; -1 keeps as many as the context has",
            ),
            ("truncation_side", "where tokens are dropped"),
            ("request_id", "changes nothing: the header `X-Request-Id` names a request"),
        )
    },
    # Of scores.
    "text_1": "a query for all of `text_2`, or one for each",
    "text_2": "what is scored: a text or several",
    "query": "what the documents are compared with",
    "RerankRequest.documents": "texts, or objects with a `text`",
    "top_n": "return the best so many documents, 0 returns all",
    "return_documents": "return the documents' texts, too",
    "use_activation": "a score is the sigmoid of the head's output, not the output itself",
    "echo": "put the prompt before the completion; with `logprobs`, not with `stream`",
    "add_special_tokens": "the chat template adds them",
    "CompletionRequest.add_special_tokens": "add the tokenizer's special tokens to prompts that "
    "are texts",
    "modalities": "only text is supported",
    "tools": "functions that the model may call; see [tools](../guides/tools.md)",
    "tool_choice": '`auto`, `none`, `required`, `{"type": "function", "function": {"name": '
    "...}}`, or OpenAI's `allowed_tools`",
    "parallel_tool_calls": "several calls in one message",
    "functions": "the older name of `tools`; calls are answered as `function_call`",
    "function_call": "the older name of `tool_choice`",
    "reasoning_effort": "for the chat template, where it reads `reasoning_effort` or "
    "`enable_thinking`; a template that reads neither ignores it",
    "cache_prompt": "`false` uses no blocks that other requests have cached",
    **dict.fromkeys(
        ("id_slot", "timings_per_token"), "changes nothing: of llama.cpp's slots and answers"
    ),
    **dict.fromkeys(("rid", "session_id"), "changes nothing: of SGLang's logs and sessions"),
    "request_id": "for `/render` and `/inference/v1/generate`, whose answers repeat it; elsewhere "
    "the header `X-Request-Id` names a request",
    "stream_interval": "changes nothing: each token is sent when it comes",
    # Of a chat template.
    "add_generation_prompt": "end the prompt with the beginning of an answer",
    "continue_final_message": "go on with the last message instead of answering it",
    "chat_template": "a Jinja template instead of the model's own; refused unless the server was "
    "started with `--trust-request-chat-template`",
    "chat_template_kwargs": "further variables of the template",
    "enable_thinking": "this variable of the template, unless `chat_template_kwargs` has it",
    "thinking_token_budget": "0 is `enable_thinking: false`; else it is not enforced, as "
    "`legato.warnings` says where a model may think: `max_tokens` bounds thinking, too",
    # Of their objects.
    "StreamOptions.include_usage": "send the token counts in a last chunk, which has no choices",
    "StreamOptions.continuous_usage_stats": "send the token counts so far in every chunk",
    "StreamOptions.include_obfuscation": "random padding is not supported",
    "ResponseFormat.type": "structural_tag is vLLM's",
    "ResponseFormat.json_schema": "goes with that type",
    "ResponseFormat.schema": "llama.cpp's: JSON of this schema, with `json_object` only",
    "ResponseFormat.structures": "tags in their older form; with `triggers`, for a structural tag",
    "ResponseFormat.triggers": "texts with which tags begin",
    "ResponseFormat.format": "tags in their newer form, for a structural tag",
    "JsonSchemaFormat.name": "changes nothing: models are not shown the schema",
    "JsonSchemaFormat.description": "changes nothing: models are not shown the schema",
    "JsonSchemaFormat.schema": "the JSON schema; without it, any object",
    "JsonSchemaFormat.strict": "refuse keywords that are not supported, rather than pass them over",
    "ChatMessage.role": "who says it: one of OpenAI's, where `function` is the older name of "
    "`tool`, or another that the chat template names or writes as it comes",
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
    # Of /v1/responses.
    "input": "a text, or the items of the conversation: `message`, `function_call`, "
    "`custom_tool_call`, the `..._output` of either, `reasoning`, and `item_reference` to a stored "
    "one",
    "instructions": "a system message that goes before all others, and is not kept",
    "previous_response_id": "the stored response that this one goes on from",
    "ResponsesRequest.store": "keep the response for later turns, within `--max-stored-responses` "
    "and `--max-stored-size`",
    "max_output_tokens": "most tokens to generate; without it, as many as the context holds",
    "ResponsesRequest.tools": "what the model may call: `function`, `custom`, and a `namespace` of "
    "either; a hosted tool is left out",
    "ResponsesRequest.tool_choice": "whether it may call any, must call one, or must call this one",
    "client_metadata": "changes nothing: the client's notes",
    "ResponsesRequest.parallel_tool_calls": "let it call several at once",
    "text": "the form of the answer",
    "reasoning": "how much the model is to think",
    "truncation": "whether a conversation that is too long is refused, or goes without its first "
    "turns; what the system says stays",
    "include": "`message.output_text.logprobs` has log probabilities shown; the others change "
    "nothing",
    "ResponsesRequest.top_logprobs": "show the log probabilities of this many most likely tokens, "
    "too",
    "ResponsesRequest.stream_options": "changes nothing: there is no padding to switch off",
    "background": "answer at once, and make the response without its client; see "
    "[responses in the background](#responses-in-the-background)",
    "max_tool_calls": "changes nothing: the server runs no tools",
    "FunctionTool.type": "which tool it is",
    "FunctionTool.name": "what it is called",
    "FunctionTool.description": "what it does",
    "FunctionTool.parameters": "a JSON schema",
    "FunctionTool.strict": "hold every call to the schema",
    "CustomTool.type": "which tool it is",
    "CustomTool.name": "what it is called",
    "CustomTool.description": "what it does",
    "CustomTool.format": "any text, or one of a grammar",
    "InputFormat.type": "which of them",
    "InputFormat.syntax": "of a grammar",
    "InputFormat.definition": "a regular expression, or a grammar in Lark",
    "NamespaceTool.type": "which tool it is",
    "NamespaceTool.name": "what stands before the tools' names",
    "NamespaceTool.description": "changes nothing: models are shown the tools alone",
    "NamespaceTool.tools": "functions and custom tools",
    "output_schema": "changes nothing: results come from the client",
    "defer_loading": "changes nothing: the model knows all tools, so that no search is needed",
    "AnthropicTool.defer_loading": "the model knows it once a `tool_reference` in a tool's result "
    "names it, or if a search by Anthropic's servers is among the tools",
    "allowed_callers": "the model calls tools itself",
    "TextOptions.format": "text, any JSON object, or JSON of a schema",
    "TextFormat.type": "which of them",
    "TextFormat.name": "changes nothing: models are not shown the schema",
    "TextFormat.description": "changes nothing: models are not shown the schema",
    "TextFormat.schema": "a JSON schema, with `json_schema` only",
    "TextFormat.strict": "hold the answer to the schema",
    "ReasoningOptions.effort": "`reasoning_effort` of `/v1/chat/completions`",
    "summary": "changes nothing: reasoning is shown whole",
    "generate_summary": "changes nothing: reasoning is shown whole",
    "ResponseStreamOptions.include_obfuscation": "random padding is not supported",
    # Of /v1/messages.
    "MessagesRequest.max_tokens": "most tokens to generate, of thinking and answer together; the "
    "context may hold fewer",
    "system": "a system message that goes before all others",
    "MessagesRequest.tools": "functions that the model may call",
    "MessagesRequest.tool_choice": "whether it may call any, must call one, or must call this one",
    "CountTokensRequest.tools": "functions that the model may call",
    "CountTokensRequest.tool_choice": "with `none`, tools do not count; the others count alike",
    "CountTokensRequest.output_format": "changes nothing: models are not shown the schema",
    "thinking": "switch the model's thinking on or off, where its chat template can",
    "output_config": "how much the model is to think, and the form of the answer",
    "output_format": "the old name of `format` in `output_config`",
    "context_management": "what is cleared from a long conversation before the model reads it",
    "thread": "refused: the server holds no conversations, and clients send the whole of them",
    "ContextManagement.edits": "`clear_thinking_20251015`, `clear_tool_uses_20250919` or both, "
    "applied one after the other",
    "ClearThinking.type": "clear the thinking of old turns",
    "ClearThinking.keep": 'the most recent turns that keep theirs, `{"type": "thinking_turns", '
    '"value": 1}` unless sent; or `"all"`',
    "ClearToolUses.type": "replace old results of tools by a short text",
    "ClearToolUses.trigger": "how long a conversation must be: more than this",
    "ClearToolUses.keep": "the most recent tool uses, which stay",
    "ClearToolUses.clear_at_least": "tokens; an edit that clears fewer is not applied",
    "ClearToolUses.exclude_tools": "names of tools whose uses stay",
    "ClearToolUses.clear_tool_inputs": "clear the inputs of the calls, too: of all tools, or of "
    "these",
    "Trigger.type": "tokens of the prompt, or tool uses in it",
    "Trigger.value": "how many",
    "KeptToolUses.type": "tool uses",
    "KeptToolUses.value": "how many",
    "InputTokens.type": "tokens of the prompt",
    "InputTokens.value": "how many",
    "cache_control": "changes nothing: what is cached is found by itself",
    "speed": "there is one speed",
    "stop_sequences": "strings that end the output",
    "MessagesRequest.metadata": "changes nothing: the client's notes",
    "MessagesRequest.service_tier": "changes nothing: there is one tier",
    "AnthropicMessage.role": "who says it",
    "AnthropicMessage.content": "a text, or blocks: `text`, `tool_use`, `tool_result`, `thinking`; "
    "a last message of the assistant is gone on with",
    "TextBlock.type": "other blocks are for messages",
    "TextBlock.text": "texts are joined by line ends",
    "AnthropicTool.type": "of Anthropic's own tools, the search is left out, and all deferred "
    "tools are known",
    "AnthropicTool.name": "what it is called",
    "AnthropicTool.description": "what it does",
    "input_schema": "a JSON schema",
    "AnthropicTool.strict": "hold every call to the schema",
    "eager_input_streaming": "changes nothing: inputs are always streamed as they come",
    "input_examples": "changes nothing: chat templates have no place for them",
    "AnthropicToolChoice.type": "whether the model may call any, must call one, or must call this "
    "one",
    "AnthropicToolChoice.name": "with `tool`",
    "disable_parallel_tool_use": "let it call one at a time only",
    "Thinking.type": "`adaptive` and `between_tools` leave it to the model",
    "budget_tokens": "changes nothing: it is not enforced, as `legato.warnings` says where a model "
    "may think; `max_tokens` bounds thinking, too",
    "display": "show the text of thinking; `omitted` leaves it in `signature` alone",
    "OutputConfig.effort": "`reasoning_effort` of `/v1/chat/completions`",
    "OutputConfig.format": "JSON of a schema",
    "OutputFormat.type": "only schemas are supported",
    "OutputFormat.schema": "a JSON schema",
    "user_id": "changes nothing: the client's note",
    # Of /inference/v1/generate and the `/render` endpoints.
    "return_token_offsets": "for `/render`, which then says where each token begins and ends in "
    "the prompt's text; changes nothing elsewhere",
    "GenerateRequest.return_token_ids": "return the tokens of the prompt; of a stream, in the "
    "first chunk",
    "token_ids": "the prompt",
    "token_offsets": "changes nothing: of the text, which the server does not need",
    "features": "only text is supported",
    "content_parts": "only text is supported",
    "sampling_params": "how to choose the tokens, and when to stop",
    "output_mode": "what an answer has: `tokens` alone, their `text`, too, or the message that "
    "the text is",
    "parse_context": 'how a message is read with `output_mode: "derender"`, as '
    "`/v1/chat/completions/render` answers; without it, all calls are content",
    "reasoning_ended": "the answer begins outside reasoning, even if the prompt opens it",
    "reasoning_parser_kwargs": "changes nothing: of vLLM's parsers",
    "ec_transfer_params": "only text is supported",
    "detokenize": "must be `true` with `stop`, or with another `output_mode` than `tokens`; "
    "changes nothing else",
    "SentSamplingParams.logprobs": "return log probabilities of the sampled tokens, and of this "
    "many most likely ones",
    "skip_clone": "changes nothing: of vLLM's own copies",
    "flat_logprobs": "log probabilities are listed by token",
    "extra_args": "there are none",
    "output_kind": "changes nothing: `stream` says it",
    "ParseContext.tools": "functions that the prompt shows",
    "ParseContext.tool_choice": "changes nothing: it is in the rendered form of the output",
    "ParseContext.parallel_tool_calls": "changes nothing: it is in the rendered form of the output",
    "ParseContext.chat_template_kwargs": "changes nothing: the prompt is rendered",
    "history_tool_call_cnt": "changes nothing: calls get random ids",
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
    "speculative": "tokens guessed ahead of a stream: auto drafts what is worth its time, a number "
    "that many a stream",
    "itl_slo_s": "longest time from one token to the next, in seconds",
    "itl_slo_quantile": "share of a request's tokens that `itl_slo_s` is for",
    "tpot_slo_s": "longest mean time per output token, in seconds",
    "ttft_slo_s": "longest time to the first token, in seconds",
}
"""Key a field, or one of a schema; value what it is."""

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
