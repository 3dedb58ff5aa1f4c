"""The exported graph, written anew where the compiler would make slow kernels of it. What it computes stays the same.

Each module here is one pass over the graph: it names the operations that it replaces, says by which of compute, memory
bandwidth and overhead it gains, and writes in plain torch what stands in their place. The graph is traced again
afterwards, so that the compiler sees nothing but torch's own operations.
"""

from .passes import Rewritten, rewrite

__all__ = ["Rewritten", "rewrite"]
