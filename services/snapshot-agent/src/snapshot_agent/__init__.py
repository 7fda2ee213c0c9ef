"""The node agent: freezes, dumps and restores workers on the node it runs on."""
