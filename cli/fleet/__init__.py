"""Builds for many models, workflows and machines."""
