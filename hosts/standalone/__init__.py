"""Models and builds in a process that is no host, such as the command line's."""
