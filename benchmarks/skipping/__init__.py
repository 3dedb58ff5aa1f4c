"""Step skipping judged by its protocol, `benchmarks/step_skipping.md`."""
