"""The processes that read bodies, so that no text of a client's holds up another's stream."""
