"""A likeness of `cuda-bindings`; see `driver`."""
