"""The same on a virtual clock."""
