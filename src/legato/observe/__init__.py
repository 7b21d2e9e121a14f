"""Floor 4: metrics; traces, spans and explanations made of records."""
