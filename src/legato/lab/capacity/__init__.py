"""How much load a server sustains, after Sarathi-Serve (arXiv:2403.02310).

Nothing here knows of clocks or HTTP, so that simulated trials can be searched, too.
"""
