"""Floor 5: which replica of a fleet serves a request, for routers and simulators alike."""
