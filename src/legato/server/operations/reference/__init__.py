"""The API's reference for browsers, /docs."""
