"""OpenAI's endpoints, with vLLM's extensions: requests and answers."""
