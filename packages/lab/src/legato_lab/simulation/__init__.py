"""Floor 7: engines, servers and fleets on a virtual clock."""
