"""What clients are asked to do: the columns of the matrix."""

LIBRARY = {
    "chat": "a conversation, answered at once",
    "stream": "the same answer in pieces",
    "history": "a system message, and the client's own record of the last answer sent back",
    "usage": "token counts, and the same ones at a stream's end",
    "stop": "a stop string",
    "seed": "the same seed gives the same text",
    "n": "several choices",
    "logprobs": "log probabilities and their alternatives",
    "tool": "a call of some tool is required; its arguments are valid",
    "named tool": "a call of one tool is required",
    "tool loop": "a call, its result sent back, and an answer to that",
    "streamed tool": "a call whose arguments come in pieces",
    "schema": "an answer by a JSON schema, parsed into the client's own class",
    "responses": "OpenAI's Responses: text, stream, tools and schema, as the client has them",
    "error": "a refusal becomes the client's own exception, with the server's words",
    "cancel": "the client goes away, and the server stops at once",
}
"""Of libraries: key the name that scripts use, value what is seen to."""

BENCHMARK = {
    "chat run": "a run over chat completions without an error",
    "completions run": "a run over completions without an error",
    "lengths": "each answer is as long as was asked for, by the tool's own count",
    "scores": "log probabilities of given texts, by which multiple choice is scored",
}
"""Of tools that measure or evaluate a server."""

AGENT = {
    "chat": "a question, answered in the program's own output",
    "tool loop": "the model calls the program's shell, reads what the command printed, and answers",
    "session": "the same again, in the session that the program has stored",
    "second turn": "the TTFT of that session's next question, beside the first one's",
}
"""Of coding agents."""
