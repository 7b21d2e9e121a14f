"""From a configuration to an engine that can run, in a process of its own or on several ranks."""
