"""OpenAI's API but for its responses: for each endpoint, the body beside the answer."""
