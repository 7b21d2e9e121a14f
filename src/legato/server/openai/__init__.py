"""OpenAI's endpoints, with vLLM's extensions: what they take and how they answer."""
