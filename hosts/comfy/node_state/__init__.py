"""What each node shows of its engines."""
