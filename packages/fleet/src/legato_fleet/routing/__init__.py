"""Which replica of a fleet serves a request, for routers and simulators alike."""
