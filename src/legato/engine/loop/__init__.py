"""The engine's loop: apply, plan, execute, commit; its recovery from faults, and its records."""
