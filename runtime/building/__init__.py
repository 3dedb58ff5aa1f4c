"""Builds engines in a process of their own, one at a time."""
