"""The calls of a network whose blocks are on engines, in one sampling run, and the CUDA graphs that repeat them."""
