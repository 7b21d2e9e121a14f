"""POST /score and POST /rerank over HTTP, of a model with a classification head."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from legato.core.config import DEFAULT_MODEL
from tests.api.launch import running_server

QUERY = "What is the capital of France?"
DOCUMENTS = ["Paris is the capital of France.", "A cat sits on the mat.", "Berlin is in Germany."]


class Scorer:
    """A server of a tiny random model, with the default model's tokenizer."""

    def __init__(self, http: httpx.Client, model: LlamaForSequenceClassification) -> None:
        self.http = http
        self.model = model

    def answer(self, path: str, status: int = 200, **fields: Any) -> dict[str, Any]:
        response = self.http.post(path, json=fields)
        assert response.status_code == status, response.text
        body: dict[str, Any] = response.json()
        return body

    def logit(self, query: str, text: str) -> float:
        """Of transformers; this tokenizer puts the two texts side by side."""
        token_ids = [
            token_id
            for part in (query, text)
            for token_id in self.answer("/tokenize", prompt=part)["tokens"]
        ]
        with torch.inference_mode():
            return float(self.model(torch.tensor([token_ids])).logits[0, 0])

    def expected(self, *texts: str) -> list[float]:
        logits = torch.tensor([self.logit(QUERY, text) for text in texts])
        return torch.sigmoid(logits).tolist()


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scorer]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
        num_labels=1,
        pad_token_id=49_151,
    )
    model = LlamaForSequenceClassification(config).eval()
    torch.nn.init.normal_(model.score.weight)
    folder = tmp_path_factory.mktemp("scorer")
    model.save_pretrained(folder)
    flags = (str(folder), "--tokenizer", DEFAULT_MODEL, "--dtype", "float32")
    with running_server(tmp_path_factory.mktemp("server"), *flags) as server:
        yield Scorer(server.http, model)


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores(scorer: Scorer, path: str) -> None:
    answer = scorer.answer(path, text_1=QUERY, text_2=DOCUMENTS)
    scores = [one["score"] for one in answer["data"]]
    assert scores == pytest.approx(scorer.expected(*DOCUMENTS), abs=1e-4)
    assert [one["index"] for one in answer["data"]] == [0, 1, 2]
    assert answer["object"] == "list"
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 30


def test_forms_of_scores(scorer: Scorer) -> None:
    (single,) = scorer.answer("/score", text_1=QUERY, text_2=DOCUMENTS[0])["data"]
    both = scorer.answer("/score", text_1=[QUERY, DOCUMENTS[1]], text_2=DOCUMENTS[:2])["data"]
    assert both[0]["score"] == pytest.approx(single["score"], abs=1e-4)
    (raw,) = scorer.answer("/score", text_1=QUERY, text_2=DOCUMENTS[0], use_activation=False)[
        "data"
    ]
    assert raw["score"] == pytest.approx(scorer.logit(QUERY, DOCUMENTS[0]), abs=1e-3)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank"])
def test_rerank(scorer: Scorer, path: str) -> None:
    documents = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]
    answer = scorer.answer(path, query=QUERY, documents=documents, model=None)
    want = scorer.expected(*DOCUMENTS)
    order = sorted(range(3), key=lambda index: -want[index])
    results = answer["results"]
    assert [one["index"] for one in results] == order
    assert [one["document"]["text"] for one in results] == [DOCUMENTS[index] for index in order]
    assert [one["relevance_score"] for one in results] == pytest.approx(
        [want[index] for index in order], abs=1e-4
    )
    (best,) = scorer.answer(
        path, query=QUERY, documents=documents, top_n=1, return_documents=False
    )["results"]
    assert best["index"] == order[0]
    assert "document" not in best


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        ("/score", {"text_1": QUERY}, "text_2", "missing"),
        ("/score", {"text_1": [QUERY] * 2, "text_2": DOCUMENTS}, "text_1", "one, or as many"),
        ("/score", {"text_1": QUERY, "text_2": []}, "text_2", "at least 1"),
        ("/score", {"text_1": QUERY, "text_2": "x " * 300}, "text_2", "256 tokens"),
        ("/rerank", {"query": QUERY, "documents": "a"}, "documents", "list"),
        ("/rerank", {"query": QUERY, "documents": []}, "documents", "at least 1"),
        ("/rerank", {"query": QUERY, "documents": [{"txt": "a"}]}, "documents.text", "missing"),
        ("/rerank", {"query": QUERY, "documents": ["a"], "top_n": -1}, "top_n", "0"),
        ("/v1/completions", {"prompt": QUERY}, "model", "no output projection"),
    ],
)
def test_refusals(
    scorer: Scorer, path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    error = scorer.answer(path, 400, **fields)["error"]
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize("path", ["/score", "/v1/score", "/rerank", "/v1/rerank"])
def test_a_model_without_a_head(http: httpx.Client, path: str) -> None:
    fields = {"text_1": "a", "text_2": "b"} if "score" in path else {"query": "a", "documents": []}
    response = http.post(path, json=fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert "ForSequenceClassification" in error["message"]
    assert error["param"] == "model"
