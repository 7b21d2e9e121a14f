"""Floor 3: tokenizers, chat templates and the syntax of messages. Never imports torch."""
