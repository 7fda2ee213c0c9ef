"""Pure decisions, the same in standalone mode and in Kubernetes."""
