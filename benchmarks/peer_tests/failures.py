"""Why each of a peer's tests that fails does so; the reasons of vLLM's."""

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

from benchmarks.peer_tests.suite import Outcome

Kind = Literal["model", "test", "not offered"]
"""Whose it is: the default model's, the test's own assumption, or a feature's that is missing."""


class Reason(NamedTuple):
    kind: Kind
    why: str


Pattern = tuple[str, str, Kind, str]
"""Patterns of a test's id and of its message, and the reason."""


def reason_of(outcome: Outcome, patterns: Iterable[Pattern]) -> Reason | None:
    """Return the first reason that fits a failure; None if there is none."""
    for test, message, kind, why in patterns:
        if re.search(test, outcome.test) and re.search(message, outcome.message):
            return Reason(kind, why)
    return None


_RAMBLES = "a model of 135 million parameters goes on to the end of its context"
VLLM_REASONS: tuple[Pattern, ...] = (
    # The first that fits counts.
    # What needs vLLM itself.
    ("", "MagicMock", "test", "it takes values from vLLM's own Python"),
    ("root_path", "", "test", "its server has a root path and a key"),
    ("force_include_usage", "NoneType", "test", "its server runs with a flag of vLLM's"),
    ("per_request_metrics", "", "test", "its server runs with a flag of vLLM's"),
    ("test_check_models|test_models_endpoint", "", "test", "its model goes by one name"),
    ("test_render.py::.*_render_basic", "smollm2", "test", "its model goes by one name"),
    ("render_.*invalid_model", "200", "test", "its server knows one model, this one goes by any"),
    ("test_show_version", "", "test", "it is vLLM's version"),
    ("test_request_cancellation", "context length", "test", "its server has a larger context"),
    ("", "^file /", "test", "it needs fixtures of vLLM's own conftest.py"),
    ("", "RemoteOpenAIServer", "test", "it looks into the server that it would have started"),
    ("", "chat_template is not set", "test", "its tokenizer has a template"),
    ("when_tokens_only", "200 == 400", "test", "its server runs with a flag of vLLM's"),
    ("derender_mode_with_parser", "", "test", "a message needs no context to be read here"),
    ("forwards_reasoning_parser", "", "test", "its model reasons"),
    ("forwards_reasoning_ended", "400", "not offered", "include_reasoning: false"),
    ("sampling_mask", "", "not offered", "the tokens that sampling left"),
    ("abort", "404", "not offered", "/inference/v1/abort_requests"),
    ("stateful.*(test_store|test_background_error)", "Regex", "test", "other words of an error"),
    ("test_anthropic_streaming_cache_usage", "", "test", "it counts the prompt in message_delta"),
    ("test_messages_render_merges_inline_system", "", "test", "a system message keeps its place"),
    ("orca", "endpoint-load-metrics", "not offered", "ORCA's header of a server's load"),
    ("orca", "CompletionUsa", "test", "it knows no prompt_tokens_details"),
    ("test_invocations", "/invocations", "not offered", "SageMaker's endpoint"),
    ("prompt_embeds", "", "not offered", "prompts of embeddings"),
    # Fields.
    ("", "include_reasoning: only", "not offered", "include_reasoning: false"),
    ("", "use_beam_search", "not offered", "beam search"),
    ("", "truncation_side", "not offered", "prompts are cut on the left"),
    ("", "echo: only false", "not offered", "echo in chat"),
    ("", "enable_response_messages", "not offered", "messages of gpt-oss in a response"),
    ("kv_transfer_prompt_token_ids", "", "not offered", "prompt_token_ids in a transfer"),
    (
        "test_chat_echo",
        "logprobs: .* greater than",
        "not offered",
        "log probabilities of all tokens",
    ),
    # Assumptions.
    (
        "stream_options",
        "DID NOT RAISE",
        "test",
        "include_usage: false without a stream harms nobody",
    ),
    (
        "test_single_chat_session|test_completion_stream_options",
        "CompletionUsa",
        "test",
        "it knows no prompt_tokens_details, or other counts in them",
    ),
    ("", "'reasoning'", "test", "it expects null where a message has no reasoning"),
    ("test_more_than_one_prompt_logprobs", "", "test", "the prompt's token is the likeliest one"),
    ("tensorizer", "", "test", "its model goes by one name"),
    # The default model's doing.
    ("test_background", "in_progress", "model", _RAMBLES),
    ("return_tokens_as_token_ids", "🐱", "model", "it ends within a character"),
    (
        "return_token_ids",
        "im_end",
        "model",
        "it ends its text, which does not show the token of that",
    ),
    ("prompt_token_id_logprobs", "", "not offered", "prompt_logprob_token_ids"),
    ("with_lora_adapter", "", "not offered", "adapters"),
    (
        "responses/test_simple",
        "efforts of reasoning|'reasoning'|reasoning_tokens",
        "model",
        "it does not reason",
    ),
    ("responses/test_function_call", "None is not None", "model", "it does not reason"),
    ("responses/test_stateful", "'Mark'|'John'", "model", "it does not remember"),
    ("responses/test_namespace", "None is not None", "model", "it calls no tool"),
    ("return_token_ids.py::test_chat_completion_with_tool_use", "", "model", "it calls no tool"),
    (
        r"return_tokens_as_token_ids_completion\[True\]",
        "At index|invalid literal",
        "test",
        "its server runs with a flag of vLLM's",
    ),
    ("return_tokens_as_token_ids", "At index", "test", "an object's first key is the prompt's"),
    ("", "Timeout", "model", _RAMBLES),
    ("", "Unterminated string", "model", _RAMBLES),
    (
        "test_chat.py::test_(structured|response_format|complex)",
        "",
        "model",
        "its answer is another",
    ),
    ("test_echo_logprob", "endoftext", "model", "its padding token has another name"),
    ("test_completion_streaming", "'length'", "model", "its text ends before"),
    ("anthropic/test_messages", "'max_tokens' == 'end_turn'", "model", "its answer is longer"),
    ("include_reasoning", "Expected reasoning", "model", "it does not reason"),
    ("thinking_token_budget", "reasoning start marker", "model", "it does not reason"),
    ("function_calling|anthropic_tool_call", "", "model", "it calls no tool where it need not"),
    ("extra_lang_code", "", "model", "it does not translate"),
    ("responses/test_structured_output", "", "model", "its answer has the form, and other words"),
    ("responses/test_basic", "'312'|'30'", "model", "it cannot multiply"),
)
