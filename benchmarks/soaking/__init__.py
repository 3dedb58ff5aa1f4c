"""Many random prompts in a real server: whether pictures stay right, and memory and file handles flat."""
