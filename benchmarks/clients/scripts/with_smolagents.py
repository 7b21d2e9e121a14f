"""smolagents' OpenAI model and its two kinds of agents."""

import openai
from protocol import BASE_URL, KEY, MODEL, WEATHER, can, check, check_city, run
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool
from smolagents.models import ChatMessage, agglomerate_stream_deltas

QUESTION = [ChatMessage(role="user", content="What is the weather in Paris?")]
ROOM = {"max_tokens": 700}  # a small model calls a tool several times
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "place", "schema": WEATHER, "strict": True},
}


@tool
def get_weather(city: str) -> str:
    """Weather now.

    Args:
        city: where.
    """
    return f"It is sunny in {city[:20]}."


def model(**options: object) -> OpenAIModel:
    asked = {"max_tokens": 48, "client_kwargs": {"max_retries": 0}, "retry": False, **options}
    return OpenAIModel(MODEL, api_base=BASE_URL, api_key=KEY, **asked)


@can("chat")
def chat() -> None:
    check(model().generate(QUESTION).content, "there is no text")


@can("stream")
def stream() -> None:
    deltas = list(model(temperature=0).generate_stream(QUESTION))
    check(len(deltas) > 2, "the text came in one piece")
    whole = model(temperature=0).generate(QUESTION).content
    check(agglomerate_stream_deltas(deltas).content == whole, "the pieces are not the text")


@can("history")
def history() -> None:
    system = ChatMessage(role="system", content=[{"type": "text", "text": "Be brief."}])
    answer = model().generate([system, *QUESTION])
    check(model().generate([system, *QUESTION, answer, *QUESTION]).content, "there is no text")


@can("usage")
def usage() -> None:
    whole = model(temperature=0).generate(QUESTION).token_usage
    streamed = [
        delta.token_usage
        for delta in model(temperature=0).generate_stream(QUESTION)
        if delta.token_usage
    ]
    found = sum(part.output_tokens for part in streamed)
    check(found == whole.output_tokens, f"{streamed}, not {whole}")


@can("stop")
def stop() -> None:
    end = model(temperature=0).generate(QUESTION).content.split()[2]
    stopped = model(temperature=0).generate(QUESTION, stop_sequences=[end]).content
    check(end not in stopped, stopped)


@can("seed")
def seed() -> None:
    asked = model(temperature=1, seed=7)
    texts = {asked.generate(QUESTION).content for _ in range(2)}
    check(len(texts) == 1, f"the same seed gave {texts}")


@can("tool")
def required() -> None:
    (call, *_) = model(**ROOM).generate(QUESTION, tools_to_call_from=[get_weather]).tool_calls
    check(call.function.name == "get_weather", f"{call}")


@can("tool loop")
def loop() -> None:
    agent = ToolCallingAgent([get_weather], model(**ROOM), max_steps=2, verbosity_level=0)
    result = agent.run("What is the weather in Paris?", return_full_result=True)
    errors = [step["error"] for step in result.steps if step.get("error")]
    check(not any("generating" in str(error) for error in errors), f"{errors}")


@can("streamed tool")
def streamed_tool() -> None:
    asked = model(**ROOM).generate_stream(QUESTION, tools_to_call_from=[get_weather])
    (call, *_) = agglomerate_stream_deltas(list(asked)).tool_calls
    check(call.function.name == "get_weather", f"{call}")


@can("schema")
def schema() -> None:
    check_city(model(**ROOM).generate(QUESTION, response_format=FORMAT).content)
    agent = CodeAgent(
        [],
        model(**ROOM),
        max_steps=1,
        verbosity_level=0,
        use_structured_outputs_internally=True,
    )
    result = agent.run("How much is 2 + 2?", return_full_result=True)
    errors = [step["error"] for step in result.steps if step.get("error")]
    check(not any("generating" in str(error) for error in errors), f"{errors}")


@can("error")
def error() -> None:
    try:
        model(temperature=-1).generate(QUESTION)
    except openai.BadRequestError as refused:
        check("temperature" in str(refused), str(refused))
    else:
        check(False, "nothing was raised")


run()
