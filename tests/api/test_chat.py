"""POST /v1/chat/completions, answered whole."""

from typing import Any

import httpx
import openai

from tests.api.launch import MODEL

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


def test_openai_client(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_completion_tokens=60
    )
    choice = completion.choices[0]
    assert completion.object == "chat.completion"
    assert choice.message.role == "assistant"
    assert choice.message.content == "The capital of France is Paris."
    assert choice.finish_reason == "stop"
    assert completion.usage is not None
    assert completion.usage.prompt_tokens > 7, "the template adds to the question"


def test_defaults_of_other_clients_are_accepted(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        max_tokens=2,
        n=1,
        stop=None,
        store=False,
        user="somebody",
        metadata={"a": "b"},
        service_tier="auto",
        parallel_tool_calls=True,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        modalities=["text"],
        extra_body={"top_k": 5, "min_p": 0.0, "repetition_penalty": 1.1},
    )
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 2


def test_text_parts_are_one_text(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "the capital?"}]
    tokenized = [
        http.post("/tokenize", json={"messages": [{"role": "user", "content": content}]}).json()
        for content in (parts, "What is\nthe capital?")
    ]
    assert tokenized[0] == tokenized[1]


def test_an_answer_can_be_sent_back(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=4)
    history = [*QUESTION, answer.choices[0].message.model_dump(), *QUESTION]
    again = client.chat.completions.create(model=MODEL, messages=history, max_tokens=1)
    assert again.choices[0].finish_reason == "length"


def test_continue_final_message(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(
        model=MODEL,
        messages=[*QUESTION, {"role": "assistant", "content": "The capital of France is"}],
        temperature=0,
        max_tokens=1,
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )
    assert completion.choices[0].message.content == " Paris"


def test_without_a_limit_the_answer_may_take_the_room_left(http: httpx.Client) -> None:
    answer = http.post(
        "/v1/chat/completions",
        json={"messages": QUESTION, "temperature": 0, "stop": "Paris"},
    ).json()
    assert answer["choices"][0]["message"]["content"] == "The capital of France is "
    assert answer["choices"][0]["stop_reason"] == "Paris"


def test_n(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(
        model=MODEL, messages=QUESTION, n=2, max_tokens=3, temperature=0
    )
    assert [choice.index for choice in completion.choices] == [0, 1]
