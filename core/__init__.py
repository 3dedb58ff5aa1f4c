"""What an engine is: shapes, specs, environments, protocols, progress and errors. Knows no host and no backend."""
