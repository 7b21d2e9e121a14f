"""Triton kernels, each with the function that launches it. No other module imports triton."""
