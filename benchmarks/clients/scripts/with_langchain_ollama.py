"""LangChain's ChatOllama."""

import ollama
from langchain_core.messages import AIMessage, ToolMessage
from langchain_ollama import ChatOllama, OllamaEmbeddings
from langchain_parts import HISTORY, QUESTION, Place, get_weather
from protocol import MODEL, URL, can, check, check_cancelled, run


def model(**options: object) -> ChatOllama:
    asked = {"num_predict": 48, "temperature": 0, **options}
    return ChatOllama(base_url=URL, model=MODEL, validate_model_on_init=True, **asked)


@can("chat")
def chat() -> None:
    check(model().invoke("Hello").content, "there is no text")
    check(OllamaEmbeddings(base_url=URL, model=MODEL).embed_query("Hello"), "there is no vector")


@can("stream")
def stream() -> None:
    pieces = [chunk.content for chunk in model().stream(QUESTION)]
    check(len(pieces) > 2, "the text came in one piece")
    check("".join(pieces) == model().invoke(QUESTION).content, "the pieces are not the text")


@can("history")
def history() -> None:
    answer = model().invoke(HISTORY)
    check(model().invoke([*HISTORY, answer, *QUESTION]).content, "there is no text")


@can("usage")
def usage() -> None:
    whole = model().invoke(QUESTION).usage_metadata
    *_, last = (chunk.usage_metadata for chunk in model().stream(QUESTION) if chunk.usage_metadata)
    check(last["output_tokens"] == whole["output_tokens"] > 0, f"{last}, not {whole}")


@can("stop")
def stop() -> None:
    end = model().invoke(QUESTION).content.split()[2]
    stopped = model().invoke(QUESTION, stop=[end])
    check(stopped.response_metadata["done_reason"] == "stop", f"{stopped.response_metadata}")


@can("seed")
def seed() -> None:
    asked = model(seed=7, temperature=1)
    texts = {asked.invoke(QUESTION).content for _ in range(2)}
    check(len(texts) == 1, f"the same seed gave {texts}")


@can("tool loop")
def loop() -> None:
    called = AIMessage(
        "", tool_calls=[{"name": "get_weather", "args": {"city": "Paris"}, "id": "call_1"}]
    )
    result = ToolMessage("It is sunny in Paris.", tool_call_id="call_1")
    answer = model().bind_tools([get_weather]).invoke([*QUESTION, called, result])
    check(answer.content or answer.tool_calls, "there is no answer")


@can("schema")
def schema() -> None:
    parsed = model(num_predict=700).with_structured_output(Place).invoke(QUESTION)
    check(isinstance(parsed, Place), f"{parsed}")


@can("error")
def error() -> None:
    try:
        model(num_ctx=10**6).invoke(QUESTION)
    except ollama.ResponseError as refused:
        check("num_ctx" in refused.error, refused.error)
    else:
        check(False, "nothing was raised")


@can("cancel")
async def cancel() -> None:
    await check_cancelled(model(num_predict=2000).ainvoke(QUESTION))


run()
