"""Engines, servers and fleets on a virtual clock."""
