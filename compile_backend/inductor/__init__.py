"""What torch's compiler is told: its options, and its choices of kernels."""
