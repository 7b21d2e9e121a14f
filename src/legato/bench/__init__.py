"""Floor 6: workloads, load on servers over HTTP, simulation, and reports of both."""
