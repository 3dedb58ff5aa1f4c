"""Model files of random weights, which stock loader nodes take for real ones."""
