"""What nodes of other authors do to a model whose blocks run on engines: which nodes."""
