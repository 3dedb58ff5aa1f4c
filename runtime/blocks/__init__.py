"""Engines of blocks: the tier between a model as it is and an engine of the whole of it."""
