"""Engines in device memory: who owns them, their CUDA graphs, and what ends a process."""
