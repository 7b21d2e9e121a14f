"""Requests that the OpenAPI document allows and forbids; the answers must be those it describes."""

from collections import Counter
from http import HTTPStatus

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.api.launch import ServerProcess

_INDEPENDENT = frozenset(
    ("stream", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
     "frequency_penalty", "seed", "stop", "include_stop_str_in_output", "ignore_eos",
     "skip_special_tokens", "priority", "allow_best_effort", "cache_salt", "user",
     "safety_identifier", "metadata", "store", "service_tier", "parallel_tool_calls")
)  # fmt: skip
"""Fields each of whose described values is right beside any other."""

_GOOD = {
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hi"}]},
    "/inference/v1/generate": {"token_ids": [5], "sampling_params": {"max_tokens": 2}},
    "/api/chat": {"messages": [{"role": "user", "content": "Hi"}], "options": {"num_predict": 2}},
    "/api/generate": {"prompt": "Hi", "options": {"num_predict": 2}},
    "/api/embed": {"input": "Hi"},
    "/api/embeddings": {"prompt": "Hi"},
    "/api/show": {"name": "smollm2-135m-instruct"},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [5, 6]},
}
"""Key the path, value a body that is right by itself."""


def check_answers(server: ServerProcess, num_examples: int) -> Counter[str]:
    """Hold the server to its document.

    Args:
        num_examples: most requests of each operation, and as many again that it forbids.

    Returns:
        Key the operation and the status.

    Raises:
        AssertionError: an answer of 500 or more, one that is not described, a request taken that is
            described as wrong, or one refused whose fields are all right.
    """
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    told: Counter[str] = Counter()
    settings = server.http.get("/settings").json()["asked"]
    for found in document.get_all_operations():
        operation = found.ok()
        _check(operation, GenerationMode.POSITIVE, num_examples, told)
        if operation.body:
            _check(operation, GenerationMode.NEGATIVE, num_examples, told)
    server.http.patch("/settings", json=settings).raise_for_status()
    return told


def _check(
    operation: schemathesis.APIOperation,
    mode: GenerationMode,
    num_examples: int,
    told: Counter[str],
) -> None:
    @given(case=operation.as_strategy(mode))
    @settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def check(case: schemathesis.Case) -> None:
        # A schema cannot say which fields go together, or which model and classes there are.
        response = case.call()
        if response.status_code != HTTPStatus.REQUEST_ENTITY_TOO_LARGE:  # for any fault in it
            case.validate_response(response, excluded_checks=[positive_data_acceptance])
        told[f"{operation.label} {response.status_code}"] += 1
        if mode is GenerationMode.POSITIVE and operation.path in _GOOD:
            _check_independent(case)
            told[f"{operation.label} 200"] += 1

    check()


def _check_independent(case: schemathesis.Case) -> None:
    """Those of its fields that are right by themselves are, all together."""
    assert isinstance(case.body, dict)
    kept = {name: value for name, value in case.body.items() if name in _INDEPENDENT}
    case.body = {**kept, **_GOOD[case.operation.path]}
    response = case.call_and_validate()
    assert response.status_code == 200, f"{case.body} was refused: {response.text}"
