"""OpenAI's Responses API: answers in typed items, told in events, and kept for later turns."""
