"""Settings that have to be there before torch is."""

import os

# Tests share the cores with the servers they start: see _THREADS_THAT_SLEEP in engine/client.py.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
