"""Requests that the OpenAPI document allows and forbids; the answers must be those it describes."""

from collections import Counter

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.server.launch import ServerProcess


def check_answers(server: ServerProcess, num_examples: int) -> Counter[str]:
    """Hold the server to its document.

    Args:
        num_examples: most requests of each operation, and as many again that it forbids.

    Returns:
        Key the operation and the status.

    Raises:
        AssertionError: an answer of 500 or more, one that is not described, or a request taken that
            is described as wrong.
    """
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    told: Counter[str] = Counter()
    for found in document.get_all_operations():
        operation = found.ok()
        _check(operation, GenerationMode.POSITIVE, num_examples, told)
        if operation.body:
            _check(operation, GenerationMode.NEGATIVE, num_examples, told)
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
        response = case.call_and_validate(excluded_checks=[positive_data_acceptance])
        told[f"{operation.label} {response.status_code}"] += 1

    check()
