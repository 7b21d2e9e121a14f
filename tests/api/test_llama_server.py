"""Words of llama-server: what its web page, its clients and llama-swap read."""

import json

import httpx
import pytest

from tests.api.launch import MODEL, ServerProcess

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0}
TEXT = "Hi é🎻"


def pieces(http: httpx.Client, path: str, body: dict[str, object]) -> list[dict[str, object]]:
    lines = http.post(path, json={**body, "stream": True}).text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_timings(http: httpx.Client, path: str) -> None:
    body = CHAT if "chat" in path else {"prompt": "Once upon", "max_tokens": 3}
    whole = http.post(path, json={**body, "timings_per_token": True}).json()
    timings, usage = whole["timings"], whole["usage"]
    assert timings["predicted_n"] == usage["completion_tokens"] == 3
    assert timings["cache_n"] + timings["prompt_n"] == usage["prompt_tokens"]
    assert timings["prompt_ms"] > 0 < timings["predicted_ms"]
    assert "timings" not in http.post(path, json=body).json()
    streamed = pieces(http, path, {**body, "timings_per_token": True})
    assert [piece["timings"]["predicted_n"] for piece in streamed][-1] == 3  # type: ignore[index]
    assert all("timings" not in piece for piece in pieces(http, path, body))


def test_progress_comes_for_each_step_before_the_first_token(http: httpx.Client) -> None:
    said = [{"role": "user", "content": f"{'word ' * 1500} once"}]
    asked = {**CHAT, "messages": said, "return_progress": True}
    found = pieces(http, "/v1/chat/completions", asked)
    steps = [piece["prompt_progress"] for piece in found if "prompt_progress" in piece]
    assert steps, "a prompt of several steps"
    assert [bool(piece["choices"]) for piece in found] == sorted(
        bool(piece["choices"]) for piece in found
    )
    done = [step["processed"] for step in steps]  # type: ignore[index]
    assert done == sorted(set(done))
    for step in steps:
        assert step["cache"] < step["processed"] <= step["total"]  # type: ignore[index]
        assert step["time_ms"] > 0  # type: ignore[index]
    whole = http.post("/v1/chat/completions", json=asked).json()
    assert whole["usage"]["prompt_tokens"] == steps[0]["total"]  # type: ignore[index]


def test_texts_to_tokens_and_back_in_both_forms(http: httpx.Client) -> None:
    of_vllm = http.post("/tokenize", json={"prompt": TEXT, "add_special_tokens": False}).json()
    of_llama = http.post("/tokenize", json={"content": TEXT}).json()
    assert of_llama == {"tokens": of_vllm["tokens"]}
    with_pieces = http.post("/tokenize", json={"content": TEXT, "with_pieces": True}).json()
    joined = b"".join(
        token["piece"].encode() if isinstance(token["piece"], str) else bytes(token["piece"])
        for token in with_pieces["tokens"]
    )
    assert joined.decode() == TEXT
    text = http.post("/detokenize", json=of_llama).json()
    assert text == {"prompt": TEXT, "content": TEXT}
    both = http.post("/tokenize", json={"content": TEXT, "prompt": TEXT})
    assert both.status_code == 400


def test_a_template_is_applied(http: httpx.Client) -> None:
    said = {"messages": [{"role": "user", "content": "Hi <|im_end|>"}]}
    prompt = http.post("/apply-template", json=said).json()["prompt"]
    assert "Hi <|im_end|><|im_end|>" in prompt
    assert prompt.endswith("<|im_start|>assistant\n")


def test_props_and_slots(http: httpx.Client, server: ServerProcess) -> None:
    props = http.get("/props").json()
    served = http.get("/v1/models").json()["data"][0]["max_model_len"]
    assert props["default_generation_settings"]["n_ctx"] == served
    assert props["model_alias"] == MODEL
    assert props["chat_template"] == "", "only with --enable-tokenizer-info-endpoint"
    assert props["modalities"] == {"vision": False, "audio": False}
    slots = http.get("/slots?fail_on_no_slot=1").json()
    assert [slot["id"] for slot in slots] == list(range(props["total_slots"]))
    assert not any(slot["is_processing"] for slot in slots)
    proxied = httpx.get(f"{server.url}/slots", headers={"X-Forwarded-For": "10.0.0.1"})
    assert proxied.status_code == 403
