"""Floor 1: drafts of the next tokens, and their chances. Never imports torch."""
