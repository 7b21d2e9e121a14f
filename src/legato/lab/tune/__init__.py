"""Finds the settings of a server for a workload and its SLOs.

They are searched in simulation and verified on the machine.
"""
