"""Two API keys, two tenants: who a request is of, and what a flood does to the other."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from openai.types import Completion

from legato.api.app import tenants_share_cache
from legato.api.bodies.generation_options import ServiceOptions
from legato.api.config import ServerConfig
from legato.api.http.access import ApiKeys
from legato.core.request import AddRequest
from legato.core.sampling_params import SamplingParams
from legato.core.token_ids import token_array
from legato.kv.hold import prompt_digest
from tests.api.launch import MODEL, ServerProcess, long_request, running_server

FLAGS = (
    "--api-key", "ops=sk-ops,lab=sk-lab,lab=sk-lab-2", "--api-key", "sk-gateway",
    "--max-num-seqs", "2", "--max-waiting", "3", "--tenant-weight", "ops=2",
    "--served-model-name", "*",
)  # fmt: skip


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server(tmp_path_factory.mktemp("tenants"), *FLAGS) as process:
        yield process


def ask(shared: ServerProcess, key: str, **extra: object) -> Completion:
    return shared.openai(api_key=key).completions.create(
        model="smollm2-135m-instruct", prompt="Hi", max_tokens=2, extra_body=extra
    )


def num_begun(shared: ServerProcess, tenant: str) -> float:
    return shared.metric("tenant_time_to_first_token_seconds_count", tenant=tenant)


def test_a_model_of_any_name_is_told_by_its_own(shared: ServerProcess) -> None:
    client = shared.openai(api_key="sk-ops")
    completion = client.completions.create(model="gpt-4o", prompt="Hi", max_tokens=1)
    assert completion.model == MODEL
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve("gpt-4o").id == "gpt-4o"


STORY = "Once upon a time there was a violin that nobody could play. " * 10


def num_cached(server: ServerProcess, key: str, topic: str, **extra: object) -> int:
    completion = server.openai(api_key=key).completions.create(
        model=MODEL, prompt=f"{topic}. {STORY}", max_tokens=1, extra_body=extra
    )
    assert completion.usage is not None
    assert completion.usage.prompt_tokens_details is not None
    return completion.usage.prompt_tokens_details.cached_tokens or 0


def test_a_tenant_finds_no_prompt_of_another_in_the_cache(shared: ServerProcess) -> None:
    """Its keys share what it has sent; keys that name no tenant share theirs."""
    assert num_cached(shared, "sk-lab", "Violas") == 0
    assert num_cached(shared, "sk-lab-2", "Violas") > 64
    for key in ("sk-ops", "sk-gateway"):
        assert num_cached(shared, key, "Violas") == 0
        assert num_cached(shared, key, "Violas") > 64
    assert num_cached(shared, "sk-gateway", "Violas", tenant="lab") > 64, "as that key's"


def test_a_salt_divides_a_tenants_own_cache(shared: ServerProcess) -> None:
    for key in ("sk-lab", "sk-ops"):
        assert num_cached(shared, key, "Cellos", cache_salt="a") == 0
        assert num_cached(shared, key, "Cellos", cache_salt="a") > 64
        assert num_cached(shared, key, "Cellos", cache_salt="b") == 0
        assert num_cached(shared, key, "Cellos") == 0


def test_vectors_are_kept_apart_too(shared: ServerProcess) -> None:
    usages = [
        shared.openai(api_key=key).embeddings.with_raw_response.create(
            model=MODEL, input=f"Harps. {STORY}"
        )
        for key in ("sk-lab", "sk-ops", "sk-ops")
    ]
    found = [one.http_response.json()["usage"]["prompt_tokens_details"] for one in usages]
    cached = [one["cached_tokens"] for one in found]
    assert cached[:2] == [0, 0]
    assert cached[2] > 64


def test_tenants_share_the_cache_if_they_are_told_to(tmp_path: Path) -> None:
    flags = (*FLAGS[:4], "--share-cache-between-tenants")
    with running_server(tmp_path, *flags) as server:
        assert num_cached(server, "sk-lab", "Violas") == 0
        assert num_cached(server, "sk-ops", "Violas") > 64
        assert num_cached(server, "sk-gateway", "Violas") > 64


@pytest.mark.parametrize(
    ("keys", "are_apart"),
    [
        ((), False),
        (("a",), False),
        (("a", "b"), False),
        (("lab=a", "lab=b"), False),
        (("lab=a", "ops=b"), True),
        (("lab=a", "b"), True),
    ],
)
def test_only_several_tenants_are_kept_apart(keys: tuple[str, ...], are_apart: bool) -> None:
    admins = ("admin",) if keys else ()
    config = ServerConfig(api_keys=keys, admin_api_keys=admins)
    assert tenants_share_cache(config) is not are_apart


@pytest.mark.parametrize(
    ("key", "extra", "tenant"),
    [
        ("sk-ops", {}, "ops"),
        ("sk-ops", {"tenant": "ops"}, "ops"),
        ("sk-lab", {}, "lab"),
        ("sk-lab-2", {}, "lab"),
        ("sk-gateway", {}, "default"),
        ("sk-gateway", {"tenant": "ops"}, "ops"),
        ("sk-gateway", {"tenant": "team-7:eu@x.example"}, "team-7:eu@x.example"),
    ],
)
def test_a_key_names_a_tenant_or_lets_the_request_name_one(
    shared: ServerProcess, key: str, extra: dict[str, str], tenant: str
) -> None:
    before = num_begun(shared, tenant)
    service_s = shared.metric("tenant_service_seconds_total", tenant=tenant)
    ask(shared, key, **extra)
    assert num_begun(shared, tenant) == before + 1
    assert shared.metric("tenant_service_seconds_total", tenant=tenant) > service_s


@pytest.mark.parametrize(
    ("key", "tenant"),
    [
        ("sk-ops", "lab"),
        ("sk-lab", "ops"),
        ("sk-gateway", ""),
        ("sk-gateway", "a b"),
        ("sk-gateway", "-a"),
        ("sk-gateway", "a" * 65),
        ("sk-gateway", "t\u00e4"),
        ("sk-gateway", 7),
        ("sk-gateway", ["ops"]),
    ],
)
def test_a_tenant_that_is_none_or_the_keys_not(
    shared: ServerProcess, key: str, tenant: object
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(shared, key, tenant=tenant)
    assert caught.value.param == "tenant"


@pytest.mark.parametrize("key", ["ops=sk-ops", "ops", "sk-ops=", "sk-lab-3"])
def test_what_is_no_key(shared: ServerProcess, key: str) -> None:
    response = shared.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
    assert response.status_code == 401


def test_a_key_that_looks_named_but_ends_there_is_whole() -> None:
    keys = ApiKeys(["c2VjcmV0Cg==", "YWI=", "team=c2VjcmV0Cg==", "a b=c"])
    assert keys.find(b"c2VjcmV0Cg==") == (True, None)
    assert keys.find(b"YWI=") == (True, None)
    assert keys.find(b"a b=c") == (True, None)
    assert ApiKeys(["team=YWI="]).find(b"YWI=") == (True, "team")
    assert keys.find(b"=") == (False, None)
    assert not ApiKeys([])


def test_only_the_flood_is_refused(shared: ServerProcess) -> None:
    """It has the running place that is not kept, and all that wait; then the other comes."""
    ask(shared, "sk-ops")

    async def run() -> list[int]:
        async with httpx.AsyncClient(base_url=shared.url, timeout=60.0) as client:

            async def flood() -> int:
                headers = {"Authorization": "Bearer sk-lab"}
                body = long_request()
                async with client.stream(
                    "POST", "/v1/completions", json=body, headers=headers
                ) as response:
                    if response.status_code == 429:
                        assert int(response.headers["Retry-After"]) > 0
                        return 429
                    async for _ in response.aiter_bytes():
                        pass
                    return response.status_code

            tasks = [asyncio.create_task(flood())]
            while shared.metric("tenant_requests_running", tenant="lab") < 1:
                await asyncio.sleep(0.02)
            tasks += [asyncio.create_task(flood()) for _ in range(4)]
            while shared.metric("tenant_requests_waiting", tenant="lab") < 3:
                await asyncio.sleep(0.02)
            assert shared.metric("tenant_requests_running", tenant="lab") == 1
            for _ in range(3):
                answer = await asyncio.to_thread(ask, shared, "sk-ops")
                assert answer.choices[0].finish_reason == "length"
            refused = [task.result() for task in tasks if task.done()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return refused

    before = shared.metric("tenant_requests_refused_total", tenant="lab")
    assert asyncio.run(run()) == [429, 429]
    assert shared.metric("tenant_requests_refused_total", tenant="lab") == before + 2
    assert shared.metric("tenant_requests_refused_total", tenant="ops") == 0


@pytest.mark.parametrize("salt", [None, "s"])
def test_servers_that_share_a_request_know_its_prompt_though_it_shares_no_blocks(
    salt: str | None,
) -> None:
    """Each reads the same body, of a client that wants no cached blocks."""
    requests = [
        AddRequest(
            request_id="",
            prompt_token_ids=token_array([1, 2]),
            params=SamplingParams(),
            service=ServiceOptions(cache_prompt=False, cache_salt=salt).service_params(),
        )
        for _ in range(2)
    ]
    assert len({prompt_digest(request) for request in requests}) == 1
    assert len({request.service.block_salt for request in requests}) == 2
