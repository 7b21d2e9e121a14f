"""The largest load that a server sustains, after Sarathi-Serve (arXiv:2403.02310).

Nothing here uses clocks or HTTP, so that simulated trials can be searched, too.
"""
