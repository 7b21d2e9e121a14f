"""A fleet without Ray: its front door and its replicas in one process, engines in others."""
