"""Records on their way to files, spans and explanations."""
