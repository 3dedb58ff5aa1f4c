"""The documentation's page of benchmarks, made of the rows."""
