"""Rewrites of the exported graph where the compiler would make slow kernels of it; the results stay the same.

Each module here is one pass over the graph: it says which operations it replaces, whether that reduces compute, memory
traffic or launch overhead, and implements the replacement as a torch function. The graph is traced again afterwards,
so that the compiler sees only torch operations.
"""

from .passes import Rewritten, rewrite

__all__ = ["Rewritten", "rewrite"]
