"""The side that callers see: requests in, text out."""
