"""Commands for those who work on Legato."""
