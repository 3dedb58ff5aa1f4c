"""What several nodes have in common."""
