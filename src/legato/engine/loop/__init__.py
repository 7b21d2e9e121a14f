"""The loop: apply, plan, execute, commit; what it does about faults, and its records."""
