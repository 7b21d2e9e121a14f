"""Processes that read bodies, seen from the server: no client's text blocks a stream."""
