"""Measures calls and whole pictures in this process."""
