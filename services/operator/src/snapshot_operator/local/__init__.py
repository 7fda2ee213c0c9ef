"""Standalone mode: the store, the scheduler and the kubelet of a cluster without Kubernetes."""
