"""The tests that peers ship of their own HTTP APIs, against a running Legato."""
