"""Endpoints for supervisors, monitoring and operators."""
