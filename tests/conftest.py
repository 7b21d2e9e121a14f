"""Settings that have to be there before torch is."""

import os

# Tests share the cores with the servers they start: see _SHORT_SPIN in legato/engine/connection.py.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
