"""The cluster world: the same objects over the Kubernetes API."""
