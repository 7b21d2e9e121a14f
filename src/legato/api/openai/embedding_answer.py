"""POST /v1/embeddings: its answers. Its requests are in `embedding_body.py`."""

import base64
import sys
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response

from legato.api.answer import PromptTokensDetails, respond_whole
from legato.api.context import ArrivalDep, ContextDep
from legato.api.http.bodies import JsonBytes
from legato.api.http.json_text import json_pieces, listed
from legato.api.job import Job
from legato.api.openai.embedding_body import EmbeddingRequest, EmbeddingTerms
from legato.api.openapi import body_route
from legato.api.submit import JobRun
from legato.engine.errors import RequestFailedError
from legato.language.completion import CompletionDelta
from legato.language.embedding import finished_embedding

router = APIRouter(tags=["OpenAI"])


class EmbeddingObject(msgspec.Struct, frozen=True, kw_only=True):
    """The vector of one input: a list of numbers, or base64 of float32 in little-endian order."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class EmbeddingAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The vectors of all inputs, in their order."""

    id: str
    object: Literal["list"] = "list"
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage


class PooledVectors:
    """Collects the vectors of a job, which come in any order."""

    def __init__(self, job: Job) -> None:
        self._vectors: dict[int, bytes] = {}  # key: index of the prompt
        self._num_prompt_tokens = job.num_prompt_tokens
        self._num_cached_tokens = 0

    def take(self, choice: int, delta: CompletionDelta) -> None:
        """Keep a prompt's vector. Raises `RequestFailedError` if it has ended without one."""
        pooled = delta.output.pooled
        if pooled is None:
            raise RequestFailedError("the engine computed no vector for this request")
        self._vectors[choice] = pooled
        self._num_cached_tokens += delta.output.num_cached_tokens

    def __iter__(self) -> Iterator[bytes]:
        """Iterate in the order of the prompts."""
        return (self._vectors[index] for index in range(len(self._vectors)))

    @property
    def usage(self) -> EmbeddingUsage:
        count = self._num_prompt_tokens
        return EmbeddingUsage(count, count, PromptTokensDetails(self._num_cached_tokens))


class _EmbeddingsWriter(PooledVectors):
    """A `WholeAnswer` of vectors."""

    def __init__(self, job: Job, *, answer_id: str, model: str) -> None:
        super().__init__(job)
        self._terms = job.terms_as(EmbeddingTerms)
        self._id, self._model = answer_id, model

    def pieces(self) -> Iterable[bytes]:
        answer = EmbeddingAnswer(
            id=self._id,
            data=listed(
                EmbeddingObject(index=index, embedding=self._encoded(pooled))
                for index, pooled in enumerate(self)
            ),
            model=self._model,
            usage=self.usage,
        )
        return json_pieces(answer)

    def _encoded(self, pooled: bytes) -> list[float] | str:
        terms = self._terms
        vector = finished_embedding(pooled, dimensions=terms.dimensions, normalize=terms.normalizes)
        if terms.encoding_format == "float":
            return vector.tolist()
        if sys.byteorder == "big":
            vector.byteswap()
        return base64.b64encode(vector).decode()


@router.post("/v1/embeddings", **body_route(EmbeddingRequest, EmbeddingAnswer))
async def create_embeddings(body: JsonBytes, context: ContextDep, arrival: ArrivalDep) -> Response:
    """Return a vector for each input."""
    job = await context.text.job("embeddings", body, arrival)
    writer = _EmbeddingsWriter(job, answer_id=f"embd-{arrival.answer_id}", model=context.model_name)
    return await respond_whole(JobRun(context, job, arrival), writer)
