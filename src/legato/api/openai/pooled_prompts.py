"""Reads the bodies whose prompts become vectors or scores."""

from collections.abc import Iterator, Sequence

from legato.api.bodies.body_model import BodyParser, Prompt
from legato.api.openai.embedding_body import EmbeddingRequest, PooledOptions
from legato.api.openai.score_body import RerankRequest, ScoreRequest
from legato.api.outcome import EmbeddingTerms, End, Part, PromptTokens, ScoreTerms
from legato.core.errors import naming_fields
from legato.core.token_ids import token_array
from legato.language.embedding import check_dimensions, kept_tokens
from legato.language.tokenizer.tokenizer import Tokenizer


class PooledPrompts:
    """Makes prompts for vectors and scores, each truncated as its request says.

    Raises:
        ApiError, InvalidRequestError: as of `RequestReader.read`; `kept_tokens` may refuse a
            prompt, too.
    """

    def __init__(self, tokenizer: Tokenizer, parser: BodyParser) -> None:
        self._tokenizer = tokenizer
        self._parser = parser
        self._info = parser.serving.info

    def embeddings(self, body: bytes) -> Iterator[Part | End]:
        request = self._parser.parse(EmbeddingRequest, body)
        check_dimensions(request.dimensions, self._info.hidden_size)
        with naming_fields(prompt="input"):
            self._check(request.input, request)
            for prompt in request.input:
                yield PromptTokens(token_array(self._input_tokens(prompt, request)))
        yield EmbeddingTerms(
            service=request.service_params(),
            encoding_format=request.encoding_format,
            dimensions=request.dimensions,
            normalizes=request.normalize,
        )

    def score(self, body: bytes) -> Iterator[Part | End]:
        request = self._parser.parse(ScoreRequest, body)
        yield from self._pairs(request, request.pairs, "text_2")
        yield ScoreTerms(
            service=request.service_params(),
            field_name="text_2",
            is_activated=request.use_activation,
        )

    def rerank(self, body: bytes) -> Iterator[Part | End]:
        request = self._parser.parse(RerankRequest, body)
        yield from self._pairs(request, request.pairs, "documents")
        yield ScoreTerms(
            service=request.service_params(),
            field_name="documents",
            is_activated=request.use_activation,
            top_n=request.top_n,
            documents=request.documents if request.return_documents else None,
        )

    def _pairs(
        self, options: PooledOptions, pairs: Sequence[tuple[str, str]], field_name: str
    ) -> Iterator[Part]:
        with naming_fields(prompt=field_name):
            self._check([query + text for query, text in pairs], options)
            for query, text in pairs:
                whole = self._tokenizer.encode_pair(query, text, options.add_special_tokens)
                yield PromptTokens(token_array(self._kept(whole, whole, options)))

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
