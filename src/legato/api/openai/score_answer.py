"""POST /score and POST /rerank: their answers. Their requests are in `score_body.py`."""

import math
import time
from collections.abc import Iterable
from typing import Literal

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response
from msgspec import UNSET, UnsetType

from legato.api.answer import respond_whole
from legato.api.arrival import Arrival
from legato.api.context import ApiContext, ArrivalDep, ContextDep
from legato.api.http.bodies import JsonBytes
from legato.api.http.json_text import json_pieces
from legato.api.job import Job
from legato.api.openai.embedding_answer import EmbeddingUsage, PooledVectors
from legato.api.openai.score_body import RerankRequest, ScoreRequest, ScoreTerms
from legato.api.openapi import body_route
from legato.api.submit import JobRun
from legato.engine.client.requests import check_scores
from legato.language.embedding import finished_embedding

router = APIRouter(tags=["scores"])


class Score(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["score"] = "score"
    index: int
    score: float


class ScoreAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The scores of all pairs, in their order."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class RankedText(msgspec.Struct, frozen=True):
    text: str


class RankedDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Attributes: index: of the document in the request."""

    index: int
    document: RankedText | UnsetType = UNSET
    relevance_score: float


class RerankAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Documents by their scores, the best first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: EmbeddingUsage


class _ScoresWriter(PooledVectors):
    """A `WholeAnswer` of scores, or of documents by their scores."""

    def __init__(self, job: Job, arrival: Arrival, model: str) -> None:
        super().__init__(job)
        self._terms = job.terms_as(ScoreTerms)
        self._arrival, self._model = arrival, model

    def pieces(self) -> Iterable[bytes]:
        scores = [self._score(pooled) for pooled in self]
        return json_pieces(
            self._scored(scores) if self._terms.top_n is None else self._ranked(scores)
        )

    def _score(self, pooled: bytes) -> float:
        (logit,) = finished_embedding(pooled, dimensions=None, normalize=False)
        # A sigmoid that does not overflow.
        return 0.5 + 0.5 * math.tanh(0.5 * logit) if self._terms.is_activated else logit

    def _scored(self, scores: list[float]) -> ScoreAnswer:
        return ScoreAnswer(
            id=f"score-{self._arrival.answer_id}",
            created=int(time.time()),
            model=self._model,
            data=[Score(index=index, score=score) for index, score in enumerate(scores)],
            usage=self.usage,
        )

    def _ranked(self, scores: list[float]) -> RerankAnswer:
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        texts = self._terms.documents
        return RerankAnswer(
            id=f"rerank-{self._arrival.answer_id}",
            model=self._model,
            results=[
                RankedDocument(
                    index=index,
                    document=UNSET if texts is None else RankedText(texts[index]),
                    relevance_score=scores[index],
                )
                for index in order[: self._terms.top_n or None]
            ],
            usage=self.usage,
        )


async def _answered(
    kind: Literal["score", "rerank"], body: JsonBytes, context: ApiContext, arrival: Arrival
) -> Response:
    check_scores(context.engine.info)
    job = await context.text.job(kind, body, arrival)
    writer = _ScoresWriter(job, arrival, context.model_name)
    return await respond_whole(JobRun(context, job, arrival), writer)


@router.post("/v1/score", **body_route(ScoreRequest, ScoreAnswer))
@router.post("/score", **body_route(ScoreRequest, ScoreAnswer))
async def score(body: JsonBytes, context: ContextDep, arrival: ArrivalDep) -> Response:
    """Return how well each text goes with a query."""
    return await _answered("score", body, context, arrival)


@router.post("/v1/rerank", **body_route(RerankRequest, RerankAnswer))
@router.post("/rerank", **body_route(RerankRequest, RerankAnswer))
async def rerank(body: JsonBytes, context: ContextDep, arrival: ArrivalDep) -> Response:
    """Sort documents by how well they go with a query."""
    return await _answered("rerank", body, context, arrival)
