"""Engines on their way between machines: archives, and stores at an address."""
