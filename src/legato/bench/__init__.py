"""Floor 4: load and measurement of servers over HTTP."""
