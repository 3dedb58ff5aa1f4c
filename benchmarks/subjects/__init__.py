"""What is measured: models, jobs and the variants of both."""
