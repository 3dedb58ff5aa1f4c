"""Whether an engine computes what the model does, and faster."""
