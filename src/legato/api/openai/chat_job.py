"""The job of a chat, in OpenAI's API or in another one that is converted to it."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from legato.api.bodies.answer_size import check_answer_size
from legato.api.bodies.as_chat import ChatBody
from legato.api.bodies.body_model import JobMaker, validated
from legato.api.job import End, Job, JobPrompt, Part, packed
from legato.api.openai.chat_body import ChatRequest
from legato.core.errors import naming_fields
from legato.core.sampling_params import SamplingParams, ThinkingLimit
from legato.core.step_record import Operation
from legato.engine.client.requests import last_tokens
from legato.language.conversation.prompt import RenderedChat, described
from legato.language.conversation.thought_end import thinking_limit, without_thought
from legato.language.forms.message_grammar import message_form
from legato.language.message.message_syntax import MessageSyntax


class ChatJobs(JobMaker):
    """Makes jobs of chats."""

    def read(self, body: bytes, *, is_rendered: bool = False) -> Iterator[Part | End]:
        """Yield warnings, and the job of a chat. Args: is_rendered: as of `read_other`."""
        request = self._parser.parse(ChatRequest, body)
        yield from self._read(
            request,
            "chat",
            field_names={"prompt": "messages", "max_tokens": _limit_name(request)},
            terms=None,
            is_held=not request.stream,
            is_rendered=is_rendered,
        )

    def read_other(
        self,
        shared: Mapping[str, Any],
        chat: ChatBody,
        operation: Operation,
        *,
        field_names: dict[str, str],
        terms: msgspec.Struct | None = None,
        bounds_output: bool = False,
        is_rendered: bool = False,
    ) -> Iterator[Part | End]:
        """Yield warnings, and the job of another API's request, whose fields errors name.

        Args:
            shared: the request's fields that a chat has, too, in JSON.
            chat: the request as a chat.
            field_names, terms: of the job.
            bounds_output: whether `max_tokens` may be more than the context has room for.
            is_rendered: whether the prompt is the answer.
        """
        with chat.naming_fields():
            asked = validated(ChatRequest, {**shared, **chat.fields})
            for tool in asked.tools or ():
                tool.function.input_grammar = chat.input_grammars.get(tool.function.name)
            parts = self._read(
                asked,
                operation,
                field_names=field_names,
                terms=terms,
                is_held=True,
                bounds_output=bounds_output,
                is_rendered=is_rendered,
            )
            yield from chat.renamed_parts(parts)

    def num_tokens(self, chat: ChatBody, *, is_cut: bool) -> int:
        """Return the tokens of a chat's prompt. Args: is_cut: as of `ChatPrompts.make`."""
        with chat.naming_fields():
            return len(self._prompt(validated(ChatRequest, chat.fields), is_cut=is_cut).token_ids)

    def _read(
        self,
        request: ChatRequest,
        operation: Operation,
        *,
        field_names: dict[str, str],
        terms: msgspec.Struct | None,
        is_held: bool,
        bounds_output: bool = False,
        is_rendered: bool,
    ) -> Iterator[Part | End]:
        """Args: is_held: whether the answer is held until its end."""
        self._parser.check_completions(request.n)
        if is_rendered:
            terms = request.render_terms(parse_context(request))
        has_offsets = is_rendered and request.return_token_offsets
        tools, prompt = request.tool_use.shown, self._prompt(request, has_offsets=has_offsets)
        yield from request.unheeded
        yield from request.unheeded_settings(self._info.max_model_len)
        syntax = prompt.syntax if tools else prompt.syntax.without_calls()
        budget, limit = self._budget(request), None
        if prompt.may_think:
            if not is_rendered:  # the prompt's next server does not get a limit
                message, end = self._parser.serving.reasoning_budget_message, prompt.thought_end
                limit = thinking_limit(self._tokenizer, syntax, end, budget, message)
            unheld = budget if limit is None else None
            yield from request.unheeded_thinking(reads_effort=prompt.reads_effort, unheld=unheld)
        prompt_ids = prompt.token_ids
        if limit is not None:
            prompt_ids, syntax, limit = without_thought(prompt_ids, syntax, limit)
        params, syntax = self._params(request, syntax, limit)
        name = _limit_name(request)
        with naming_fields(max_tokens=name):
            capped = self._parser.capped(params)
            token_ids = last_tokens(prompt_ids, capped, self._info.max_model_len)
            params = yield from self._limited(params, len(token_ids), name)
            room = self._info.max_model_len - len(token_ids)
            if bounds_output and params.max_tokens is not None and 0 < room < params.max_tokens:
                params = msgspec.structs.replace(params, max_tokens=room)
            job = Job(
                operation=operation,
                prompts=(JobPrompt.of(token_ids, prompt.offsets),),
                params=params,
                service=request.service_params(),
                answer=request.answer_options(
                    message_syntax=None if syntax.is_plain else syntax,
                    calls_functions=bool(request.functions),
                    field_names=field_names,
                ),
                kv_transfer_params=request.kv_transfer,
                terms=packed(terms),
            )
            if is_held:
                check_answer_size(job, self._info.max_model_len)
        yield job

    def _budget(self, request: ChatRequest) -> int | None:
        """Return how many tokens may be thinking at most; None without a limit."""
        serving, budget = self._parser.serving, request.thinking_token_budget
        if budget is None:
            budget = serving.reasoning_budget
        limits = [n for n in (budget, serving.max_reasoning_budget) if n not in (None, -1)]
        return min([*limits, self._info.max_model_len]) if limits else None

    def _params(
        self, request: ChatRequest, syntax: MessageSyntax, thinking: ThinkingLimit | None
    ) -> tuple[SamplingParams, MessageSyntax]:
        """Return how to sample, and the syntax to read the answer by."""
        special_marks = self._tokenizer.special_marks(syntax)
        use, outputs = request.tool_use, request.output_form
        if use.callable or outputs is not None:
            with naming_fields(**request.form_names):
                form = message_form(use, outputs, syntax, self._forms, special_marks)
            outputs, syntax = form.outputs, form.syntax
            thinking = thinking if form.may_think else None
        with naming_fields(logprobs="top_logprobs", max_tokens=_limit_name(request)):
            params = request.sampling_params(
                self._defaults.sampling,
                max_tokens=request.output_limit,
                logprobs=request.num_logprobs,
                kept_special_tokens=tuple(special_marks.values()),
                structured_outputs=outputs,
                thinking_limit=thinking,
            )
            return self._known(params), syntax

    def _prompt(
        self, request: ChatRequest, *, is_cut: bool = False, has_offsets: bool = False
    ) -> RenderedChat:
        return self._prompts.make(
            [message.for_template() for message in request.messages],
            request.conversation_options,
            request.tool_use.shown,
            effort=request.effort,
            is_cut=is_cut or request.truncate_prompt_tokens is not None,
            has_offsets=has_offsets,
        )


def parse_context(request: ChatRequest) -> bytes:
    """Return how the answer is read, as the JSON of a `ParseContext`."""
    use = request.tool_use
    calls = [len(message.tool_calls or ()) for message in request.messages]
    context: dict[str, Any] = {
        "tools": [
            {"type": "function", "function": {**described(tool), "strict": tool.is_strict}}
            for tool in use.shown
        ]
        or None,
        "tool_choice": _choice(request) if use.shown else "none",
        "parallel_tool_calls": use.is_parallel,
        "include_reasoning": True,
        "chat_template_kwargs": request.template_variables,
        "history_tool_call_cnt": sum(calls),
    }
    return msgspec.json.encode(context)


def _choice(request: ChatRequest) -> Any:
    choice = request.tool_choice or request.function_call
    if choice is None:
        return "auto"
    named = choice.model_dump(exclude_none=True)
    return choice.type if named.keys() == {"type"} else named


def _limit_name(request: ChatRequest) -> str:
    """Return the name by which the client limits the output."""
    if request.max_completion_tokens is not None:
        return "max_completion_tokens"
    return "num_predict" if (request.num_predict or 0) > 0 else "max_tokens"
