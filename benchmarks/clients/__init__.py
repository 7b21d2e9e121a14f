"""Which clients work with Legato, and in what: current ones, each in an environment of its own."""
