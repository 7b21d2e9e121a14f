"""OpenAI's Responses API: the body of a request beside its answer, kept or streamed."""
