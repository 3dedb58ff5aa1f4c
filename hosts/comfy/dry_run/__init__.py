"""The part of a workflow that builds one node's engines, run with one step of each kind."""
