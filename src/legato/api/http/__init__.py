"""HTTP connections, middleware, bodies and errors, common to all endpoints."""
