"""Packages for kinds of blocks: the weights are arguments, so that one serves all blocks of its kind."""
