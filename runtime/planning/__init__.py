"""From a call of a model to the engine that is wanted for it."""
