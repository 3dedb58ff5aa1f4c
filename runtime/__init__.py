"""From "this model, these shapes" to a running engine: cache hit, build, or the eager module with a reason."""
