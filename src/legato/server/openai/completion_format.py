"""OpenAI's answers to requests for plain completions."""

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from legato.core.outputs import TokenLogprobs
from legato.engine.frontend.completion import Completion, CompletionDelta
from legato.model.tokenizer import Tokenizer
from legato.server.generation.answer import UsageField
from legato.server.generation.job import Job
from legato.server.generation.usage import Usage
from legato.server.openai.completion_request import CompletionRequest
from legato.server.openai.logprobs import (
    CompletionLogprobs,
    CompletionLogprobsWriter,
    PromptLogprobs,
    prompt_logprobs,
)


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes: `stop_reason` and `prompt_logprobs` are vLLM's."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer, or a chunk of one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: UsageField = UNSET


class CompletionFormat:
    """Words the answers to one request.

    Args:
        prompt_text: gives what `echo` puts before the completions of a prompt; called with its
            index once it has an output.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: CompletionRequest,
        job: Job,
        prompt_text: Callable[[int], str],
        *,
        answer_id: str,
        created: int,
        model: str,
    ) -> None:
        self._tokenizer = tokenizer
        self._request = request
        self._job = job
        self._prompt_text = prompt_text
        self._id = answer_id
        self._created = created
        self._model = model
        self._writers: dict[int, CompletionLogprobsWriter] = {}  # key choice, of those begun

    def answer(self, completions: list[Completion], usage: Usage) -> CompletionAnswer:
        num_per_prompt = self._job.params.n
        choices = [
            # Every completion of a prompt shows the scores that came with its first.
            self._choice(completion, completions[i - i % num_per_prompt].prompt_logprobs or [])
            for i, completion in enumerate(completions)
        ]
        return self._answer(choices, usage)

    def chunk(self, choice: int, delta: CompletionDelta, usage: UsageField) -> CompletionAnswer:
        is_first = choice not in self._writers
        prefix = self._echoed_text(choice) if is_first else ""
        piece = Choice(
            index=choice,
            text=prefix + delta.text,
            logprobs=self._logprobs(choice, delta.logprobs),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
        return self._answer([piece], usage)

    def usage_chunk(self, usage: Usage) -> CompletionAnswer:
        return self._answer([], usage)

    def _choice(self, completion: Completion, scored: Sequence[TokenLogprobs]) -> Choice:
        wants_scores = self._request.prompt_logprobs is not None
        return Choice(
            index=completion.index,
            text=self._echoed_text(completion.index) + completion.text,
            logprobs=self._whole_logprobs(completion, scored),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            prompt_logprobs=prompt_logprobs(self._tokenizer, scored) if wants_scores else UNSET,
        )

    def _whole_logprobs(
        self, completion: Completion, scored: Sequence[TokenLogprobs]
    ) -> CompletionLogprobs | None:
        if not self._request.echo or completion.logprobs is None:
            return self._logprobs(completion.index, completion.logprobs)
        prompt = self._job.prompts[completion.index // self._job.params.n]
        writer = self._writer(completion.index)
        return writer.write_prompt(prompt, scored) + writer.write(completion.logprobs)

    def _logprobs(
        self, choice: int, entries: Sequence[TokenLogprobs] | None
    ) -> CompletionLogprobs | None:
        writer = self._writer(choice)
        return None if entries is None else writer.write(entries)

    def _writer(self, choice: int) -> CompletionLogprobsWriter:
        if choice not in self._writers:
            self._writers[choice] = CompletionLogprobsWriter(
                self._tokenizer,
                num_top=self._request.logprobs or 0,
                skip_special_tokens=self._job.params.skip_special_tokens,
            )
        return self._writers[choice]

    def _echoed_text(self, choice: int) -> str:
        if not self._request.echo:
            return ""
        return self._prompt_text(choice // self._job.params.n)

    def _answer(self, choices: list[Choice], usage: UsageField) -> CompletionAnswer:
        return CompletionAnswer(
            id=self._id, created=self._created, model=self._model, choices=choices, usage=usage
        )
