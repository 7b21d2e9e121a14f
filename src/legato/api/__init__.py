"""Floor 7: HTTP to text: the server, its endpoints, and the processes that read bodies."""
