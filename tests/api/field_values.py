"""A value for each documented field of a request that must change what the server reads.

Two tables, both by the schema's name in the OpenAPI document.
"""

from typing import Any, NamedTuple

from legato.api.bodies.body_model import Kind

_SAID = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes"},
    {"role": "user", "content": "And now?"},
]
_PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
_FUNCTION = {"name": "f", "description": "d", "parameters": _PARAMETERS}
_TOOL = {"type": "function", "function": _FUNCTION}
_CHAT = {"messages": _SAID}
_CALLING = {**_CHAT, "tools": [_TOOL], "tool_choice": "required"}
_NAMED = {"type": "function", **_FUNCTION}
_RESPONSE = {"input": "Hi"}
_CLAUDE_TOOL = {"name": "f", "description": "d", "input_schema": _PARAMETERS}
_MESSAGE = {"messages": _SAID, "max_tokens": 9}
_CLAUDE_CALLING = {**_MESSAGE, "tools": [_CLAUDE_TOOL], "tool_choice": {"type": "any"}}
_EBNF = 'root ::= "a"'
_EDITED = {
    "max_tokens": 9,
    "tools": [_CLAUDE_TOOL],
    "messages": [
        {"role": "user", "content": "Hi"},
        *(
            message
            for i in "12345"
            for message in (
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": f"Hm {i}.", "signature": ""},
                    {"type": "tool_use", "id": i, "name": "f", "input": {"a": 5}}]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": i, "content": "a result " * 9}]},
                {"role": "assistant", "content": f"So {i}."},
                {"role": "user", "content": "Go on."},
            )
        ),
    ],
}  # fmt: skip
_TAG = {"begin": "<a>", "end": "</a>"}
_TAGS = {
    "type": "structural_tag",
    "structures": [{**_TAG, "schema": {}}],
    "triggers": ["<a>"],
}


class Place(NamedTuple):
    """Where an object of a schema stands in a body.

    Attributes:
        path: keys and indices from the body to the object.
        body: right, with an object at the path.
    """

    kind: Kind
    body: dict[str, Any]
    path: tuple[str | int, ...] = ()


PLACES: dict[str, Place] = {
    "ChatRequest": Place("chat", _CHAT),
    "CompletionRequest": Place("completions", {"prompt": "Hi there"}),
    "EmbeddingRequest": Place("embeddings", {"input": "one two three four"}),
    "ScoreRequest": Place("score", {"text_1": "Hi", "text_2": "one two three four"}),
    "RerankRequest": Place("rerank", {"query": "Hi", "documents": ["one two three four", "No"]}),
    "ResponsesRequest": Place("responses", _RESPONSE),
    "MessagesRequest": Place("messages", _MESSAGE),
    "CountTokensRequest": Place("count_tokens", {"messages": _SAID}),
    "TokenizeRequest": Place("tokenize", {"messages": _SAID}),
    "DetokenizeRequest": Place("detokenize", {"tokens": [5]}),
    "OllamaChatRequest": Place("ollama_chat", _CHAT),
    "OllamaGenerateRequest": Place("ollama_generate", {"prompt": "Hi there"}),
    "OllamaEmbedRequest": Place("ollama_embed", {"input": "one two three four"}),
    "OllamaEmbeddingsRequest": Place("ollama_embeddings", {"prompt": "one two three four"}),
    "OllamaNamedRequest": Place("ollama_show", {"model": "m"}),
    "OllamaMessage": Place("ollama_chat", _CHAT, ("messages", 1)),
    "OllamaOptions": Place("ollama_generate", {"prompt": "Hi", "options": {}}, ("options",)),
    "GenerateRequest": Place("generate", {"token_ids": [5], "sampling_params": {}}),
    "ChatMessage": Place("chat", _CHAT, ("messages", 1)),
    "MessageToolCall": Place(
        "chat",
        {"messages": [*_SAID, {"role": "assistant", "tool_calls": [{"function": _FUNCTION}]}]},
        ("messages", 3, "tool_calls", 0),
    ),
    "CalledFunction": Place(
        "chat",
        {"messages": [*_SAID, {"role": "assistant", "function_call": {"name": "f"}}]},
        ("messages", 3, "function_call"),
    ),
    "Tool": Place("chat", _CALLING, ("tools", 0)),
    "FunctionDefinition": Place(
        "chat", {**_CALLING, "tool_choice": "auto"}, ("tools", 0, "function")
    ),
    "StreamOptions": Place(
        "chat", {**_CHAT, "stream": True, "stream_options": {}}, ("stream_options",)
    ),
    "KVTransferRequest": Place(
        "chat", {**_CHAT, "kv_transfer_params": {}}, ("kv_transfer_params",)
    ),
    "ResponseFormat": Place(
        "chat", {**_CHAT, "response_format": {"type": "text"}}, ("response_format",)
    ),
    "JsonSchemaFormat": Place(
        "chat",
        {**_CHAT, "response_format": {
            "type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}},
        ("response_format", "json_schema"),
    ),
    "ThinkingSwitch": Place(
        "chat",
        {**_CHAT, "thinking": {"type": "enabled"},
         "chat_template": "{{ messages[0].content }}{{ enable_thinking }}{{ clear_thinking }}"},
        ("thinking",),
    ),
    "ReasoningSwitch": Place("chat", {**_CHAT, "reasoning": {}}, ("reasoning",)),
    "ReportedUsage": Place("chat", {**_CHAT, "stream": True, "usage": {}}, ("usage",)),
    "FunctionTool": Place("responses", {**_RESPONSE, "tools": [_NAMED]}, ("tools", 0)),
    "CustomTool": Place(
        "responses", {**_RESPONSE, "tools": [{"type": "custom", "name": "f"}]}, ("tools", 0)
    ),
    "InputFormat": Place(
        "responses",
        {**_RESPONSE, "tool_choice": "required", "tools": [{"type": "custom", "name": "f",
            "format": {"type": "grammar", "syntax": "regex", "definition": 'start: "a"'}}]},
        ("tools", 0, "format"),
    ),
    "NamespaceTool": Place(
        "responses",
        {**_RESPONSE, "tools": [{"type": "namespace", "name": "n", "tools": [_NAMED]}]},
        ("tools", 0),
    ),
    "TextOptions": Place("responses", {**_RESPONSE, "text": {}}, ("text",)),
    "TextFormat": Place(
        "responses",
        {**_RESPONSE, "text": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        ("text", "format"),
    ),
    "ReasoningOptions": Place("responses", {**_RESPONSE, "reasoning": {}}, ("reasoning",)),
    "ResponseStreamOptions": Place(
        "responses", {**_RESPONSE, "stream": True, "stream_options": {}}, ("stream_options",)
    ),
    "AnthropicMessage": Place("messages", _MESSAGE, ("messages", 0)),
    "TextBlock": Place(
        "messages", {**_MESSAGE, "system": [{"type": "text", "text": "S"}]}, ("system", 0)
    ),
    "AnthropicTool": Place(
        "messages",
        {**_MESSAGE, "tools": [_CLAUDE_TOOL, {**_CLAUDE_TOOL, "name": "h"}]},
        ("tools", 0),
    ),
    "AnthropicToolChoice": Place("messages", _CLAUDE_CALLING, ("tool_choice",)),
    "Thinking": Place("messages", {**_MESSAGE, "thinking": {"type": "adaptive"}}, ("thinking",)),
    "OutputConfig": Place("messages", {**_MESSAGE, "output_config": {}}, ("output_config",)),
    "OutputFormat": Place(
        "messages",
        {**_MESSAGE, "output_format": {"type": "json_schema", "schema": {"type": "object"}}},
        ("output_format",),
    ),
    "AnthropicMetadata": Place("messages", {**_MESSAGE, "metadata": {}}, ("metadata",)),
    "ContextManagement": Place(
        "messages", {**_EDITED, "context_management": {}}, ("context_management",)
    ),
    **{
        schema: Place(
            "messages",
            {**_EDITED, "context_management": {"edits": [{"type": edit, **fields}]}},
            ("context_management", "edits", 0, *path),
        )
        for schema, edit, fields, path in (
            ("ClearThinking", "clear_thinking_20251015", {}, ()),
            ("ClearToolUses", "clear_tool_uses_20250919",
             {"trigger": {"type": "tool_uses", "value": 1}}, ()),
            ("Trigger", "clear_tool_uses_20250919",
             {"trigger": {"type": "tool_uses", "value": 1}}, ("trigger",)),
            ("KeptToolUses", "clear_tool_uses_20250919",
             {"trigger": {"type": "tool_uses", "value": 1},
              "keep": {"type": "tool_uses", "value": 1}}, ("keep",)),
            ("InputTokens", "clear_tool_uses_20250919",
             {"trigger": {"type": "tool_uses", "value": 1},
              "clear_at_least": {"type": "input_tokens", "value": 1}}, ("clear_at_least",)),
        )
    },
    "SentSamplingParams": Place(
        "generate", {"token_ids": [5], "sampling_params": {}}, ("sampling_params",)
    ),
    "ParseContext": Place(
        "generate",
        {"token_ids": [5], "sampling_params": {}, "output_mode": "derender", "parse_context": {}},
        ("parse_context",),
    ),
}  # fmt: skip
"""Key a schema; value where it is tried."""

VALUES: dict[str, Any] = {
    "model": "another",
    "stream": True,
    # Of `SamplingOptions` and `ServiceOptions`.
    "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.5,
    "presence_penalty": 1, "frequency_penalty": 1, "logit_bias": {"5": 1}, "seed": 1,
    "allowed_token_ids": [5], "bad_words": ["a"], "min_tokens": 2, "stop_token_ids": [5],
    "logprob_token_ids": [5], "ignore_eos": True, "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "slo_class": "batch", "tenant": "t", "priority": 1, "allow_best_effort": True,
    "cache_salt": "s", "cache_prompt": False, "truncate_prompt_tokens": 1,
    # Of `GenerationRequest`.
    "stream_options": {"include_usage": True}, "n": 2, "max_tokens": 7, "stop": ["a"],
    "prompt_logprobs": 1, "return_token_ids": True, "return_tokens_as_token_ids": True,
    "return_token_offsets": True, "kv_transfer_params": {"do_remote_decode": True},
    "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"},
    "guided_json": {"type": "object"}, "guided_regex": "a", "guided_choice": ["a"],
    "guided_grammar": _EBNF, "regex": "a", "ebnf": _EBNF, "grammar": _EBNF,
    "json_schema": {"type": "object"},
    # Hints.
    "user": "u", "safety_identifier": "s", "metadata": {"a": "b"}, "service_tier": "flex",
    "prompt_cache_key": "k", "prompt_cache_retention": "24h", "verbosity": "low",
    "prompt_cache_options": {"a": 1}, "spaces_between_special_tokens": False, "id_slot": 1,
    "timings_per_token": True, "return_progress": True, "session_id": "s",
    "request_id": "r", "rid": "r",
    "stream_interval": 2, "client_metadata": {"a": "b"}, "max_tool_calls": 1,
    "prediction": {"type": "content", "content": "a"}, "num_ctx": 512, "num_keep": 4,
    "num_batch": 8, "num_thread": 2, "num_gpu": 1, "main_gpu": 1, "use_mmap": False,
    "use_mlock": True, "numa": True, "low_vram": True, "keep_alive": "5m",
    "provider": {"sort": "price"}, "models": ["m"], "route": "fallback",
    "transforms": ["middle-out"], "drop_params": True, "litellm_session_id": "s",
    "litellm_trace_id": "t", "mirostat_eta": 0.1, "mirostat_tau": 5.0, "repeat_last_n": 64,
    # Other servers' forms.
    "repeat_penalty": 1.1, "num_predict": 7, "think": False, "usage": {"include": True},
    "include": True, "ThinkingSwitch.type": "disabled", "clear_thinking": False,
    "ThinkingSwitch.budget_tokens": 0, "ReasoningSwitch.max_tokens": 0, "enabled": False,
    "ResponsesRequest.include": ["message.output_text.logprobs"],
    # Of a template, and of tools.
    "tools": [_TOOL], "add_generation_prompt": False, "continue_final_message": True,
    "chat_template": "x", "chat_template_kwargs": {"enable_thinking": False},
    "enable_thinking": False, "thinking_token_budget": 0, "thinking_budget": 0,
    "tool_choice": "none",
    "parallel_tool_calls": False, "functions": [_FUNCTION], "function_call": {"name": "f"},
    "reasoning_effort": "high",
    # Of single bodies.
    "messages": _SAID[:1], "max_completion_tokens": 7, "logprobs": True, "top_logprobs": 2,
    "prompt": "Yes", "add_special_tokens": False, "echo": True, "best_of": 3,
    "CompletionRequest.logprobs": 2,
    "input": "Yes", "encoding_format": "base64", "dimensions": 2, "normalize": False,
    "truncation_side": "left", "text_1": "No", "text_2": "Yes", "query": "Yes",
    "documents": ["No"], "top_n": 1, "return_documents": False, "use_activation": False,
    "instructions": "Be brief.", "previous_response_id": "resp_1", "store": False,
    "background": True, "max_output_tokens": 7, "truncation": "auto",
    "text": {"format": {"type": "json_object"}}, "reasoning": {"effort": "none"},
    "ResponsesRequest.tools": [_NAMED],
    "ResponsesRequest.stream_options": {"include_obfuscation": False},
    **{f"{name}.tools": [_CLAUDE_TOOL] for name in ("MessagesRequest", "CountTokensRequest")},
    "MessagesRequest.tool_choice": {"type": "none"},
    "CountTokensRequest.tool_choice": {"type": "none"},
    "system": "S", "thinking": {"type": "disabled"}, "output_config": {"effort": "none"},
    "output_format": {"type": "json_schema", "schema": {"type": "object"}},
    "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
    "thread": {"id": "t"}, "cache_control": {"type": "ephemeral"}, "stop_sequences": ["a"],
    "MessagesRequest.metadata": {"user_id": "u"},
    "MessagesRequest.service_tier": "standard_only",
    "return_token_strs": True, "tokens": [6], "token_ids": [6], "token_offsets": [],
    "sampling_params": {"seed": 1}, "output_mode": "text", "reasoning_ended": True,
    "parse_context": {"tools": [_TOOL]}, "reasoning_parser_kwargs": {"a": 1},
    "detokenize": False, "skip_clone": True, "output_kind": 1, "history_tool_call_cnt": 1,
    "SentSamplingParams.logprobs": 1,
    "content": "Yes", "add_special": True, "with_pieces": True,
    # Of Ollama's.
    **{f"Ollama{name}Request.stream": False for name in ("Chat", "Generate", "Named")},
    "options": {"seed": 2}, "format": "json",
    "truncate": True, "shift": True, "raw": True, "OllamaNamedRequest.name": "m",
    "verbose": True, "insecure": True, "username": "u", "password": "p",
    "OllamaOptions.repeat_penalty": 1.5, "OllamaOptions.repeat_last_n": 0,
    "OllamaOptions.num_predict": 7, "OllamaOptions.num_ctx": 4096,
    **{
        f"OllamaOptions.{name}": 2
        for name in (
            "mirostat_tau", "mirostat_eta", "num_keep", "num_batch", "num_gpu", "main_gpu",
            "num_thread",
        )
    },
    **{f"OllamaOptions.{name}": True for name in ("use_mmap", "use_mlock", "low_vram", "numa")},
    "draft_num_predict": 2, "f16_kv": True, "logits_all": True,
    "OllamaMessage.role": "user", "OllamaMessage.content": "No", "OllamaMessage.name": "Al",
    "OllamaMessage.function_call": {"name": "f"}, "OllamaMessage.reasoning": "Hm.",
    "OllamaMessage.thinking": "Hm.", "tool_name": "t",
    # Of their objects.
    "include_usage": True, "continuous_usage_stats": True,
    "do_remote_decode": True, "do_remote_prefill": True, "remote_host": "h", "remote_port": 5,
    "transfer_id": "t", "signature": "s", "is_early": True,
    "ChatMessage.role": "user", "ChatMessage.content": "No", "tool_call_id": "t",
    "ChatMessage.name": "Al", "tool_calls": [{"function": _FUNCTION}],
    "ChatMessage.function_call": {"name": "f"}, "reasoning_content": "Hm.",
    "ChatMessage.reasoning": "Hm.", "refusal": "No.",
    "MessageToolCall.id": "other", "MessageToolCall.function": {"name": "g"},
    "CalledFunction.name": "g", "arguments": {"a": 1},
    "Tool.function": {"name": "g"}, "parameters": {"type": "object"},
    "FunctionDefinition.name": "g",
    "name": "g", "description": "other", "strict": True,
    "ResponseFormat.type": "json_object",
    "ResponseFormat.json_schema": {"name": "n", "schema": {"type": "object"}},
    "ResponseFormat.schema": {"type": "object"}, "structures": [{**_TAG, "schema": {}}],
    "triggers": ["<"], "ResponseFormat.format": {"type": "const_string", "value": "a"},
    "JsonSchemaFormat.schema": {"type": "array"},
    "JsonSchemaFormat.strict": True,
    "output_schema": {"type": "object"},
    "defer_loading": True,
    "CustomTool.format": {"type": "grammar", "syntax": "regex", "definition": "a"},
    "InputFormat.type": "text", "syntax": "lark", "definition": "b",
    "NamespaceTool.tools": [{**_NAMED, "name": "g"}],
    "TextOptions.format": {"type": "json_object"},
    "TextFormat.type": "text", "TextFormat.schema": {"type": "array"},
    "effort": "none", "summary": "detailed", "generate_summary": "detailed",
    "AnthropicMessage.role": "assistant", "AnthropicMessage.content": "No",
    "TextBlock.text": "No",
    "AnthropicTool.type": "tool_search_tool_regex",
    "input_schema": {"type": "object"},
    "eager_input_streaming": True, "input_examples": [{"a": 1}],
    "AnthropicToolChoice.type": "none", "AnthropicToolChoice.name": "f",
    "disable_parallel_tool_use": True,
    "Thinking.type": "disabled", "budget_tokens": 9, "display": "omitted",
    "OutputConfig.format": {"type": "json_schema", "schema": {"type": "object"}},
    "OutputFormat.schema": {"type": "array"},
    "user_id": "u",
    "edits": [{"type": "clear_thinking_20251015"}],
    "ClearThinking.keep": "all",
    "trigger": {"type": "tool_uses", "value": 99},
    "ClearToolUses.keep": {"type": "tool_uses", "value": 1},
    "clear_at_least": {"type": "input_tokens", "value": 9999},
    "exclude_tools": ["f"], "clear_tool_inputs": True,
    "Trigger.type": "input_tokens", "Trigger.value": 99,
    "KeptToolUses.value": 2, "InputTokens.value": 9999,
}  # fmt: skip
"""Key a field, or one of a schema; value what it is set to."""

BESIDE: dict[str, dict[str, Any]] = {
    "ChatRequest.tool_choice": {"tools": [_TOOL]},
    "ChatRequest.parallel_tool_calls": {"tools": [_TOOL], "tool_choice": "required"},
    "ChatRequest.function_call": {"functions": [_FUNCTION]},
    "ChatRequest.top_logprobs": {"logprobs": True},
    "ChatRequest.continue_final_message": {"add_generation_prompt": False, "messages": _SAID[:2]},
    "ResponsesRequest.tool_choice": {"tools": [_NAMED]},
    "ResponsesRequest.parallel_tool_calls": {"tools": [_NAMED], "tool_choice": "required"},
    "MessagesRequest.tool_choice": {"tools": [_CLAUDE_TOOL]},
    "CountTokensRequest.tool_choice": {"tools": [_CLAUDE_TOOL]},
    "TokenizeRequest.continue_final_message": {
        "add_generation_prompt": False, "messages": _SAID[:2]},
    **{f"TokenizeRequest.{name}": {"messages": None, "prompt": "Hi"}
       for name in ("prompt", "add_special_tokens")},
    "TokenizeRequest.content": {"messages": None},
    **{f"TokenizeRequest.{name}": {"messages": None, "content": "Hi"}
       for name in ("add_special", "with_pieces")},
    "return_progress": {"stream": True},
    "OllamaChatRequest.top_logprobs": {"logprobs": True},
    "OllamaGenerateRequest.top_logprobs": {"logprobs": True},
    "OllamaEmbedRequest.truncate": {"input": "long " * 3000},
    "OllamaNamedRequest.name": {"model": None},
    "OllamaOptions.repeat_last_n": {"repeat_penalty": 1.5},
    "ChatRequest.logprob_token_ids": {"logprobs": True},
    "CompletionRequest.logprob_token_ids": {"logprobs": 1},
    "ResponsesRequest.logprob_token_ids": {"include": ["message.output_text.logprobs"]},
    "ResponsesRequest.truncation": {
        "input": [{"role": "user", "content": text} for text in ("long " * 3000, "Hi")]},
    "parse_context": {"output_mode": "derender"},
    "reasoning_ended": {"output_mode": "derender", "token_ids": [44, 17400, 46]},  # "<think>"
    "refusal": {"content": ""},
    "InputFormat.type": {"syntax": None, "definition": None},
    "TextFormat.type": {"schema": None},
    "Trigger.type": {"value": 50},
    "detokenize": {"stop": ["a"]},
    "stream_options": {"stream": True},
    "include_stop_str_in_output": {"stop": ["a"]},
    "SentSamplingParams.include_stop_str_in_output": {},
    "MessagesRequest.include_stop_str_in_output": {},
    "ResponsesRequest.include_stop_str_in_output": {},
    "truncation_side": {"truncate_prompt_tokens": 3},
    "continuous_usage_stats": {"include_usage": True},
    "ResponseFormat.json_schema": {"type": "json_schema"},
    "ResponseFormat.schema": {"type": "json_object"},
    "structures": {"type": "structural_tag", "triggers": ["<a>"]},
    "triggers": _TAGS,
    "ResponseFormat.format": {"type": "structural_tag"},
    "AnthropicToolChoice.name": {"type": "tool"},
}  # fmt: skip
"""Key as of `VALUES`; value the fields of the same object that the field goes with."""
