"""`legato`'s measuring commands: `bench`, `simulate`, `tune` and `demo`."""
