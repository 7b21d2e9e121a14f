"""Forms that an answer can be held to, written as grammars."""
