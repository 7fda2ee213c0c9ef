"""The world of a Kubernetes cluster: its API server is the store, its kubelets run the pods."""
