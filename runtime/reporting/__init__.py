"""Facts about engines, builds and runs as plain data, for people."""
