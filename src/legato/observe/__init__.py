"""Floor 5: metrics; traces, spans and explanations made of records."""
