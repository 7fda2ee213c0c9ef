"""The tools that the operator works with."""
