"""The bodies of POST /score and POST /rerank."""

from typing import Annotated

import msgspec
from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from legato.api.bodies.body_model import OrText, RequestModel
from legato.api.openai.embedding_body import PooledOptions
from legato.core.errors import InvalidRequestError

Texts = Annotated[list[str], Field(fail_fast=True, min_length=1), OrText(lambda text: [text])]


class ScoreTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What the answer needs from its request.

    Attributes:
        is_activated: whether a score is the sigmoid of the head's output.
        top_n: most documents to return by their scores, 0 for all; None for scores alone.
        documents: texts that are returned; None without them.
    """

    is_activated: bool
    top_n: int | None = None
    documents: list[str] | None = None


class ScoreRequest(PooledOptions):
    """Texts to score by queries."""

    text_1: Texts
    """A query for all of `text_2`, or one for each."""
    text_2: Texts
    """Texts to score."""
    use_activation: bool = True
    """Return the sigmoid of the head's output."""

    @model_validator(mode="after")
    def _check_together(self) -> "ScoreRequest":
        if len(self.text_1) not in (1, len(self.text_2)):
            raise InvalidRequestError(
                f"text_1 has {len(self.text_1)} texts, and text_2 has {len(self.text_2)}; text_1 "
                "must have one, or as many",
                param="text_1",
            )
        return self

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The query and the text of each score."""
        queries = self.text_1 * len(self.text_2) if len(self.text_1) == 1 else self.text_1
        return list(zip(queries, self.text_2, strict=True))


class RerankDocument(RequestModel):
    text: str


def _as_texts(value: object) -> object:
    """Return a list of documents as texts; a document may be an object with its `text`."""
    if not isinstance(value, list):
        return value
    return [
        RerankDocument.model_validate(one).text if isinstance(one, dict) else one for one in value
    ]


class RerankRequest(PooledOptions):
    """Documents to sort by a query."""

    query: str
    """Compared with the documents."""
    documents: Annotated[
        list[str],
        Field(fail_fast=True, min_length=1),
        BeforeValidator(_as_texts),
        WithJsonSchema(
            {
                "type": "array",
                "items": {
                    "anyOf": [
                        {"type": "string"},
                        {
                            "type": "object",
                            "properties": {"text": {"type": "string"}},
                            "required": ["text"],
                        },
                    ]
                },
                "minItems": 1,
            }
        ),
    ]
    """Texts, or objects with a `text`."""
    top_n: Annotated[int, Field(ge=0)] = 0
    """Return this many best documents; 0 returns all."""
    return_documents: bool = True
    """Return the documents' texts, too."""
    use_activation: bool = True
    """Return the sigmoid of the head's output."""

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The query and each document."""
        return [(self.query, document) for document in self.documents]
