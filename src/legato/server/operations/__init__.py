"""What supervisors, monitoring and operators ask of a server."""
