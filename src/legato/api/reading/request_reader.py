"""Parses bodies, and makes prompts for the engine or whole answers of them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from legato.api.anthropic.message_body import (
    CountTokensRequest,
    MessagesRequest,
    TokenCount,
    TokensBeforeEdits,
)
from legato.api.bodies.answer_size import AnswerForm, check_answer_size
from legato.api.bodies.as_chat import ChatBody
from legato.api.bodies.body_model import BodyParser, Kind, Prompt, Serving, validated
from legato.api.bodies.chat_tools import functions_of
from legato.api.bodies.generation_options import (
    GenerationOptions,
    GenerationRequest,
    StreamOptions,
    kv_transfer_of,
)
from legato.api.limits import MAX_ANSWER_BYTES
from legato.api.openai.chat_body import ChatRequest
from legato.api.openai.completion_body import CompletionRequest
from legato.api.openai.generate_body import GenerateRequest, in_sampling_params, render_terms
from legato.api.openai.pooled_prompts import PooledPrompts
from legato.api.openai.tokenization_body import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
)
from legato.api.outcome import (
    Answered,
    End,
    GenerateTerms,
    Generation,
    MessageTerms,
    NeedsStored,
    Part,
    Piece,
    PromptTokens,
    ResponseTerms,
    Warned,
)
from legato.api.responses.input_items import Placed, Stored, shown_item, truncated
from legato.api.responses.response_body import InputTokenCount, ResponsesRequest
from legato.checkpoint.defaults import ModelDefaults
from legato.core.errors import InvalidRequestError, naming_fields
from legato.core.sampling_params import SamplingParams
from legato.core.token_ids import TokenIds, token_array
from legato.engine.client.requests import check_token_ids, last_tokens, with_bad_words
from legato.language.conversation.prompt import ChatPrompts, RenderedChat
from legato.language.forms.check import GrammarChecker
from legato.language.forms.message_grammar import message_form
from legato.language.tokenizer.tokenizer import Tokenizer

_PIECE_BYTES = 2**18


class RequestReader:
    """Parses the bodies of requests to one model.

    A body can make it take any amount of time and memory: the caller must bound both.
    """

    def __init__(self, tokenizer: Tokenizer, defaults: ModelDefaults, serving: Serving) -> None:
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._serving = serving
        self._parser = BodyParser(serving, tokenizer.max_token_chars)
        self._prompts = ChatPrompts(
            tokenizer,
            trusts_templates=serving.trust_request_chat_template,
            special_tokens=serving.message_special_tokens,
            check_fits=self._parser.check_fits,
        )
        pooled = PooledPrompts(tokenizer, self._parser)
        self._forms = GrammarChecker(lambda: tokenizer.vocabulary)
        self._by_kind: dict[Kind, Callable[[bytes], Iterator[Part | End]]] = {
            "chat": self._chat,
            "completions": self._completions,
            "embeddings": pooled.embeddings,
            "score": pooled.score,
            "rerank": pooled.rerank,
            "messages": self._messages,
            "count_tokens": self._count_tokens,
            "generate": self._generate,
            "tokenize": self._tokenize,
            "detokenize": self._detokenize,
            "tokenizer_info": self._tokenizer_info,
            "render_chat": lambda body: self._chat(body, is_rendered=True),
            "render_completions": lambda body: self._completions(body, is_rendered=True),
            "render_messages": lambda body: self._messages(body, is_rendered=True),
            "render_responses": lambda body: _without_stored(
                self._responses(body, None, is_rendered=True)
            ),
        }

    def read(self, kind: Kind, body: bytes, stored: bytes | None = None) -> Iterator[Part | End]:
        """Yield the parts and the end, which is not `Refused`.

        Args:
            stored: the `Stored` that an earlier pass found the body to need.

        Raises:
            ApiError: the body asks for another model.
            InvalidRequestError: the body cannot be served.
            MemoryError: parsing needs more memory than allowed.
        """
        self._parser.begin()
        for part in self._parts(kind, body, stored):
            if isinstance(part, End) and (names := self._parser.ignored_names):
                yield Warned(f"ignored fields: {', '.join(names)}")
            yield part

    def _parts(self, kind: Kind, body: bytes, stored: bytes | None) -> Iterator[Part | End]:
        if kind == "responses":
            return self._responses(body, stored)
        if kind == "input_tokens":
            return self._input_tokens(body, stored)
        return self._by_kind[kind](body)

    def _chat(self, body: bytes, *, is_rendered: bool = False) -> Iterator[Part | End]:
        request = self._parser.parse(ChatRequest, body)
        return self._answer(request, is_held=not request.stream, is_rendered=is_rendered)

    def _responses(
        self, body: bytes, stored: bytes | None, *, is_rendered: bool = False
    ) -> Iterator[Part | End]:
        request = self._parser.parse(ResponsesRequest, body)
        needs_turns = request.previous_response_id is not None or request.referred
        if stored is None and needs_turns:
            yield NeedsStored(request.previous_response_id, request.referred)
            return
        turns = Stored(stored or b"")
        found = turns.items()
        offered = request.offered_tools
        yield from _left_out(offered.left_out)
        yield ResponseTerms(
            shown=request.shown(),
            previous_response_id=request.previous_response_id,
            is_stored=request.store,
            is_background=request.background,
            shows_logprobs=request.shows_logprobs,
            renamed_tools=offered.renamed,
        )
        if request.store:
            yield from map(shown_item, request.own_items(found))
        items = request.items(turns.history(request.previous_response_id), found)
        if request.truncation == "auto":
            items = truncated(items, partial(self._fits, request))
        yield from self._answer_as_chat(request, request.chat(items), is_rendered=is_rendered)

    def _input_tokens(self, body: bytes, stored: bytes | None) -> Iterator[Part | End]:
        """Return the length of a response's prompt as the answer."""
        for part in self._responses(body, stored):
            if isinstance(part, PromptTokens):
                yield from _answered(InputTokenCount(len(part.token_ids)))
            elif isinstance(part, NeedsStored):
                yield part

    def _fits(self, request: ResponsesRequest, items: Sequence[Placed]) -> bool:
        """Whether a conversation leaves room for the requested output."""
        chat = request.chat(items)
        try:
            with chat.naming_fields():
                prompt = self._prompt(validated(ChatRequest, chat.fields))
        except InvalidRequestError as error:
            if error.code == "context_length_exceeded":
                return False
            raise
        room = self._serving.info.max_model_len - (request.max_output_tokens or 1)
        return len(prompt.token_ids) <= room

    def _messages(self, body: bytes, *, is_rendered: bool = False) -> Iterator[Part | End]:
        request = self._parser.parse(MessagesRequest, body)
        chat, edits = request.edited(self._num_tokens)
        yield from _left_out(request.left_out_tools)
        yield MessageTerms(
            edits=None if request.context_management is None else edits,
            omits_thinking=request.omits_thinking,
        )
        yield from self._answer_as_chat(request, chat, bounds_output=True, is_rendered=is_rendered)

    def _count_tokens(self, body: bytes) -> Iterator[Part | End]:
        request = self._parser.parse(CountTokensRequest, body)
        chat, edits = request.edited(self._num_tokens)
        count = self._num_tokens(chat)
        before: TokensBeforeEdits | UnsetType = UNSET
        if request.context_management is not None:
            before = TokensBeforeEdits(count + sum(edit.cleared_input_tokens for edit in edits))
        yield from _answered(TokenCount(count, before))

    def _num_tokens(self, chat: ChatBody) -> int:
        """Return the tokens of a chat's prompt, which may be longer than the context."""
        with chat.naming_fields():
            return len(self._prompt(validated(ChatRequest, chat.fields), is_cut=True).token_ids)

    def _answer_as_chat(
        self,
        request: GenerationOptions,
        chat: ChatBody,
        *,
        bounds_output: bool = False,
        is_rendered: bool = False,
    ) -> Iterator[Part | End]:
        """Serve another API's request as a chat; errors name the fields of that API."""
        with chat.naming_fields():
            asked = validated(ChatRequest, {**request.shared_options(), **chat.fields})
            for tool in asked.tools or ():
                tool.function.input_grammar = chat.input_grammars.get(tool.function.name)
            for part in self._answer(
                asked,
                is_held=True,
                bounds_output=bounds_output,
                is_rendered=is_rendered,
            ):
                if isinstance(part, Warned) and part.param is not None:
                    param, text = chat.renamed(part.param, part.text)
                    part = Warned(text, param)
                yield part

    def _answer(
        self,
        request: ChatRequest,
        *,
        is_held: bool,
        bounds_output: bool = False,
        is_rendered: bool = False,
    ) -> Iterator[Part | End]:
        """Yield the prompt and the generation of a chat.

        Args:
            is_held: whether the answer is held until its end.
            bounds_output: whether `max_tokens` may be more than the context has room for.
            is_rendered: whether the prompt is the answer.
        """
        self._parser.check_completions(request.n)
        if is_rendered:
            yield render_terms(request)
        has_offsets = is_rendered and request.return_token_offsets
        use, prompt = request.tool_use, self._prompt(request, has_offsets=has_offsets)
        yield from request.unheeded
        if prompt.may_think:
            yield from request.unheeded_thinking(reads_effort=prompt.reads_effort)
        syntax = prompt.syntax if use.shown else prompt.syntax.without_calls()
        special_marks = self._tokenizer.special_marks(syntax)
        with naming_fields(**request.form_names):
            held = message_form(use, request.output_form, syntax, self._forms, special_marks)
        renamed = request.max_completion_tokens is not None
        limit_name = "max_completion_tokens" if renamed else "max_tokens"
        with naming_fields(logprobs="top_logprobs", max_tokens=limit_name):
            params = request.sampling_params(
                self._defaults.sampling,
                max_tokens=request.output_limit,
                logprobs=request.num_logprobs,
                kept_special_tokens=tuple(special_marks.values()),
                structured_outputs=held.outputs,
            )
            params = self._with_known_tokens(params)
            max_len = self._serving.info.max_model_len
            token_ids = last_tokens(prompt.token_ids, params, max_len)
            room = max_len - len(token_ids)
            if bounds_output and params.max_tokens is not None and 0 < room < params.max_tokens:
                params = msgspec.structs.replace(params, max_tokens=room)
            if is_held:
                form = AnswerForm(
                    is_chat=True,
                    returns_token_ids=request.return_token_ids,
                    shows_prompt_logprobs=request.prompt_logprobs is not None,
                )
                check_answer_size(form, params, [len(token_ids)], max_len)
        yield _prompt_tokens(token_ids, prompt.offsets)
        yield _generation(
            request,
            params=params,
            output_limit_name=limit_name,
            message_syntax=None if held.syntax.is_plain else held.syntax,
            calls_functions=bool(request.functions),
        )

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

    def _completions(self, body: bytes, *, is_rendered: bool = False) -> Iterator[Part | End]:
        request = self._parser.parse(CompletionRequest, body)
        if is_rendered:
            yield render_terms(request)
        yield from request.unheeded
        self._parser.check_completions(request.n, len(request.prompt))
        decided: dict[str, int] = {}
        if request.is_echo_only:
            decided["max_tokens"] = 1  # the engine generates at least one token; it is dropped
        if request.echo and request.logprobs is not None:
            decided["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
        with naming_fields(**request.form_names):
            params = self._forms.resolved(
                request.sampling_params(self._defaults.sampling, **decided)
            )
        params = self._with_known_tokens(params)
        self._parser.check_prompts(
            request.prompt, is_cut=request.truncate_prompt_tokens is not None
        )
        max_len = self._serving.info.max_model_len
        echoed: list[str] = []
        echo_starts: list[TokenIds] = []
        prompt_lens: list[int] = []
        for prompt in request.prompt:
            token_ids = last_tokens(self._prompt_tokens(prompt, request), params, max_len)
            if request.echo:
                echoed.append(self._echo(prompt, token_ids, request))
                echo_starts.append(self._echo_starts(prompt, request))
            prompt_lens.append(len(token_ids))
            offsets = None
            if is_rendered and request.return_token_offsets and isinstance(prompt, str):
                added = request.add_special_tokens
                offsets = self._tokenizer.offsets(prompt, add_special_tokens=added)
            yield _prompt_tokens(token_ids, offsets)
        if not request.stream:
            form = AnswerForm(
                is_chat=False,
                returns_token_ids=request.return_token_ids,
                shows_prompt_logprobs=request.prompt_logprobs is not None,
                echoes=request.echo,
            )
            check_answer_size(form, params, prompt_lens, max_len)
        yield _generation(
            request,
            params=params,
            echoed=tuple(echoed) if request.echo else None,
            echo_starts=tuple(echo_starts),
            is_echo_only=request.is_echo_only,
            num_prompt_logprobs=request.prompt_logprobs,
        )

    def _generate(self, body: bytes) -> Iterator[Part | End]:
        request = self._parser.parse(GenerateRequest, body)
        yield GenerateTerms(request_id=request.request_id, output_mode=request.output_mode)
        is_message = request.output_mode == "derender"
        syntax = None
        if is_message:
            has_reasoned = bool(request.reasoning_ended)
            syntax = self._prompts.reply_syntax(
                request.token_ids, request.shown_functions, has_reasoned=has_reasoned
            )
        marks = self._tokenizer.special_marks(syntax) if syntax else {}
        sent, prompt = request.sampling_params, request.token_ids
        self._parser.check_completions(sent.n)
        check_token_ids(prompt, self._serving.info.vocab_size, "token_ids")
        with in_sampling_params():
            params = sent.params(self._defaults.sampling, kept_special_tokens=tuple(marks.values()))
            params = self._with_known_tokens(self._forms.resolved(params))
            if not request.stream:
                form = AnswerForm(
                    is_chat=True,
                    returns_token_ids=True,
                    shows_prompt_logprobs=params.prompt_logprobs is not None,
                )
                check_answer_size(form, params, [len(prompt)], self._serving.info.max_model_len)
        yield PromptTokens(token_array(prompt))
        options = request.stream_options or StreamOptions()
        yield Generation(
            params=params,
            service=request.service_params(),
            is_streamed=request.stream,
            include_usage=options.include_usage,
            continuous_usage_stats=options.continuous_usage_stats,
            returns_token_ids=request.return_token_ids,
            kv_transfer_params=kv_transfer_of(request.kv_transfer_params),
            message_syntax=None if syntax is None or syntax.is_plain else syntax,
        )

    def _prompt_tokens(self, prompt: Prompt, request: CompletionRequest) -> list[int]:
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt, request.add_special_tokens)
        return prompt

    def _tokenize(self, body: bytes) -> Iterator[Part | End]:
        request = self._parser.parse(TokenizeRequest, body)
        if request.messages is not None:
            token_ids = self._prompts.make(
                [message.for_template() for message in request.messages],
                request.conversation_options,
                functions_of(request.tools or ()),
                effort=request.effort,
            ).token_ids
        else:
            assert request.prompt is not None, "checked by TokenizeRequest"
            self._parser.check_fits(len(request.prompt), "prompt")
            token_ids = self._tokenizer.encode(
                request.prompt, request.add_special_tokens is not False
            )
        spelling = self._tokenizer.backend.id_to_token
        wants_spelling = request.return_token_strs
        yield from _answered(
            TokenizeAnswer(
                count=len(token_ids),
                max_model_len=self._serving.info.max_model_len,
                tokens=token_ids,
                token_strs=[spelling(i) or "" for i in token_ids] if wants_spelling else None,
            )
        )

    def _detokenize(self, body: bytes) -> Iterator[Part | End]:
        request = self._parser.parse(DetokenizeRequest, body)
        check_token_ids(request.tokens, self._serving.info.vocab_size, "tokens")
        text = self._tokenizer.decode(request.tokens, skip_special_tokens=False)
        yield from _answered(DetokenizeAnswer(text))

    def _tokenizer_info(self, _body: bytes) -> Iterator[Part | End]:
        yield from _answered(self._tokenizer.info)

    def _echo(self, prompt: Prompt, token_ids: Sequence[int], request: CompletionRequest) -> str:
        """Args: token_ids: of the prompt, after truncation."""
        if request.truncate_prompt_tokens is None and isinstance(prompt, str):
            return prompt
        return self._tokenizer.decode(list(token_ids), request.skip_special_tokens is not False)

    def _echo_starts(self, prompt: Prompt, request: CompletionRequest) -> TokenIds:
        is_text = request.truncate_prompt_tokens is None and isinstance(prompt, str)
        if request.logprobs is None or not is_text:
            return token_array(())
        added = request.add_special_tokens
        return token_array(self._tokenizer.starts(str(prompt), add_special_tokens=added))

    def _with_known_tokens(self, params: SamplingParams) -> SamplingParams:
        """Convert bad words to tokens, and check that the token ids exist."""
        for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            check_token_ids(getattr(params, name) or (), self._serving.info.vocab_size, name)
        return with_bad_words(params, partial(self._tokenizer.encode, add_special_tokens=False))


def _generation(request: GenerationRequest, **known: Any) -> Generation:
    options = request.stream_options or StreamOptions()
    return Generation(
        service=request.service_params(),
        is_streamed=request.stream,
        include_usage=options.include_usage,
        continuous_usage_stats=options.continuous_usage_stats,
        returns_token_ids=request.return_token_ids,
        names_tokens_by_id=request.return_tokens_as_token_ids,
        kv_transfer_params=request.kv_transfer,
        **known,
    )


def _left_out(tools: Sequence[str]) -> Iterator[Part]:
    """Yield the warning about tools that the model is not offered. Args: tools: their types."""
    if tools:
        yield Warned(f"left out tools that this server cannot run: {', '.join(tools)}")


def _prompt_tokens(
    token_ids: Sequence[int], offsets: Sequence[tuple[int, int]] | None
) -> PromptTokens:
    """Args: offsets: of the whole prompt; `token_ids` may be only its end."""
    if offsets is None:
        return PromptTokens(token_array(token_ids))
    kept = offsets[len(offsets) - len(token_ids) :]
    return PromptTokens(token_array(token_ids), token_array(chain.from_iterable(kept)))


def _without_stored(parts: Iterable[Part | End]) -> Iterator[Part | End]:
    """Yield the parts; raise if a body needs stored responses."""
    for part in parts:
        if isinstance(part, NeedsStored):
            raise InvalidRequestError(
                "a prompt that goes on from a stored response is not rendered",
                param="input" if part.item_ids else "previous_response_id",
            )
        yield part


def _answered(answer: msgspec.Struct | dict[str, Any]) -> Iterator[Part | End]:
    data = msgspec.json.encode(answer)
    if len(data) > MAX_ANSWER_BYTES:
        raise InvalidRequestError(
            f"the answer has {len(data)} bytes, over {MAX_ANSWER_BYTES}; ask for it in parts"
        )
    for start in range(0, len(data), _PIECE_BYTES):
        yield Piece(data[start : start + _PIECE_BYTES])
    yield Answered()
