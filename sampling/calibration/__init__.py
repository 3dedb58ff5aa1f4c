"""Finds which steps to compute for a model, by pictures that are sampled in full and in part."""
