"""What `.ci/run` and `make proofs` run: the steps, whose turn it is, and two lanes side by side."""
