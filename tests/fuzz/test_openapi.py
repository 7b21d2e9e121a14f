"""The OpenAPI document is true: schemathesis holds a server to every word of it."""

import pytest

from tests.api.launch import ServerProcess
from tests.fuzz.openapi import check_answers
from tests.profiles import scaled

_NUM_EXAMPLES = scaled(4)
_PATHS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"),
    *("/v1/messages/count_tokens", "/inference/v1/generate", "/tokenize", "/detokenize"),
    *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show"),
)


@pytest.mark.endurance
def test_answers_are_as_described(target: ServerProcess) -> None:
    told = check_answers(target, _NUM_EXAMPLES)
    for path in _PATHS:
        assert told[f"POST {path} 200"], told
        assert told[f"POST {path} 400"], told


def test_every_error_is_described(target: ServerProcess) -> None:
    document = target.http.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            responses = operation["responses"]
            assert {"400", "401", "403", "408", "413", "429", "431", "503"} <= set(responses), path
            assert "422" not in responses
            for status, response in responses.items():
                if status >= "400":
                    schema = response["content"]["application/json"]["schema"]
                    name = "AnthropicErrorBody" if "/messages" in path else "ErrorBody"
                    name = "OllamaErrorBody" if path.startswith("/api/") else name
                    assert schema == {"$ref": f"#/components/schemas/{name}"}
