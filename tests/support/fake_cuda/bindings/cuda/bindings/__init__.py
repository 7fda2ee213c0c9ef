"""A stand-in for `cuda-bindings`; see `driver`."""
