"""Reads the bodies whose prompts become vectors or scores."""

from collections.abc import Iterator, Sequence

import msgspec

from legato.api.bodies.body_model import JobMaker, Prompt
from legato.api.job import AnswerOptions, End, Job, JobPrompt, Part, packed
from legato.api.openai.embedding_body import EmbeddingRequest, EmbeddingTerms, PooledOptions
from legato.api.openai.score_body import RerankRequest, ScoreRequest, ScoreTerms
from legato.core.errors import naming_fields
from legato.core.pooling import UNSAMPLED, PromptPooling
from legato.core.step_record import Operation
from legato.language.embedding import check_dimensions, kept_tokens


class PooledPrompts(JobMaker):
    """Makes prompts for vectors and scores, each truncated as its request says.

    Raises:
        ApiError, InvalidRequestError: as of `RequestReader.read`; `kept_tokens` may refuse a
            prompt, too.
    """

    def embeddings(self, body: bytes) -> Iterator[Part | End]:
        yield from self.embedded(self._parser.parse(EmbeddingRequest, body))

    def embedded(self, request: EmbeddingRequest) -> Iterator[Part | End]:
        """Yield the job of a request for vectors."""
        check_dimensions(request.dimensions, self._info.hidden_size)
        with naming_fields(prompt="input"):
            self._check(request.input, request)
            prompts = [
                JobPrompt.of(self._input_tokens(prompt, request)) for prompt in request.input
            ]
        terms = EmbeddingTerms(
            encoding_format=request.encoding_format,
            dimensions=request.dimensions,
            normalizes=request.normalize,
        )
        yield _job("embeddings", request, prompts, self._info.pooling, "input", terms)

    def score(self, body: bytes) -> Iterator[Part | End]:
        request = self._parser.parse(ScoreRequest, body)
        prompts = self._pairs(request, request.pairs, "text_2")
        terms = ScoreTerms(is_activated=request.use_activation)
        yield _job("score", request, prompts, "score", "text_2", terms)

    def rerank(self, body: bytes) -> Iterator[Part | End]:
        request = self._parser.parse(RerankRequest, body)
        prompts = self._pairs(request, request.pairs, "documents")
        terms = ScoreTerms(
            is_activated=request.use_activation,
            top_n=request.top_n,
            documents=request.documents if request.return_documents else None,
        )
        yield _job("rerank", request, prompts, "score", "documents", terms)

    def _pairs(
        self, options: PooledOptions, pairs: Sequence[tuple[str, str]], field_name: str
    ) -> list[JobPrompt]:
        with naming_fields(prompt=field_name):
            self._check([query + text for query, text in pairs], options)
            return [self._pair(query, text, options) for query, text in pairs]

    def _pair(self, query: str, text: str, options: PooledOptions) -> JobPrompt:
        whole = self._tokenizer.encode_pair(query, text, options.add_special_tokens)
        return JobPrompt.of(self._kept(whole, whole, options))

    def _check(self, prompts: Sequence[Prompt], options: PooledOptions) -> None:
        self._parser.check_completions(1, len(prompts))
        self._parser.check_prompts(prompts, is_cut=options.truncate_prompt_tokens is not None)

    def _input_tokens(self, prompt: Prompt, options: PooledOptions) -> Sequence[int]:
        if not isinstance(prompt, str):
            return self._kept(prompt, prompt, options)
        whole = bare = self._tokenizer.encode(prompt, options.add_special_tokens)
        if options.add_special_tokens and options.truncate_prompt_tokens is not None:
            bare = self._tokenizer.encode(prompt, add_special_tokens=False)
        return self._kept(whole, bare, options)

    def _kept(
        self, whole: Sequence[int], bare: Sequence[int], options: PooledOptions
    ) -> Sequence[int]:
        """Args: bare: the tokens without the special ones around them."""
        count, side = options.truncate_prompt_tokens, options.truncation_side
        return kept_tokens(whole, bare, count, side, self._info.max_model_len)


def _job(
    operation: Operation,
    options: PooledOptions,
    prompts: Sequence[JobPrompt],
    pooling: PromptPooling,
    field_name: str,
    terms: msgspec.Struct,
) -> Job:
    """Args: field_name: the client's name of the prompts."""
    return Job(
        operation=operation,
        prompts=tuple(prompts),
        params=UNSAMPLED,
        service=options.service_params(),
        answer=AnswerOptions(field_names={"prompt": field_name}),
        pooling=pooling,
        terms=packed(terms),
    )
