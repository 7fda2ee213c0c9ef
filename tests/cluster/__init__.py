"""A real Kubernetes cluster on this machine, and the tests that run on one."""
