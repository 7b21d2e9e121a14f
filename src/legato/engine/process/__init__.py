"""The boundary between the HTTP server and the engine's own process."""
