"""Adversaries, the cases of issue 58 and slowdown on traces, for the scheduler in simulation."""
