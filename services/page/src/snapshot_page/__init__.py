"""A web page of the objects, nodes and orders of a cluster. It is read-only."""
