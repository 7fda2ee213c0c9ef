"""The kinds of `nvidia.com/v1alpha1`, a module a kind."""
