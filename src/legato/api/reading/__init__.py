"""What runs inside a process that reads bodies. Never imports FastAPI."""
