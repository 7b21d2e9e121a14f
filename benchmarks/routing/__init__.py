"""What routing is worth to a fleet, in real time and on a virtual clock."""
