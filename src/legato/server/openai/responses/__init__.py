"""OpenAI's Responses API: answers in typed items and events, stored for later turns."""
