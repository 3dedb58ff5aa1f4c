"""CUDA graphs whose capture cannot end the process: the memory that a capture needs is set aside before it begins."""
