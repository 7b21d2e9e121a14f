"""Measures how long steps take, keeps that on disk, and measures again while idle."""
