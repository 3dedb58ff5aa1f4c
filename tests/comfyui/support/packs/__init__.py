"""Node packs of other authors, as they are: what they do to a model, and what Slipstream makes of it."""
