"""The commands of `legato` that measure: `bench`, `simulate`, `tune` and `demo`."""
