"""A whole step of a sampling run as one CUDA graph."""
