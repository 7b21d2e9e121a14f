"""Floor 8: engines, servers and fleets on a virtual clock."""
