"""Legato: LLM serving whose streams never stall."""
