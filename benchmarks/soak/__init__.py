"""A server under three times the load that it sustains, with every fault that clients and machines
bring: does anything leak, grow, get lost or change?
"""
