"""The objects of the store: our own kinds, and the Pods, Jobs and Nodes around them."""
