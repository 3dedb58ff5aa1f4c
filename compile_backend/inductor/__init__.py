"""Settings of torch's compiler: its options, and its choices of kernels."""
