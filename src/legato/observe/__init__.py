"""Floor 5: metrics; records on their way to traces, spans and explanations."""
