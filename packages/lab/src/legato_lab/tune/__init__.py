"""Finds the best settings of a server for a workload and its SLOs.

It searches in simulation and verifies on the machine.
"""
