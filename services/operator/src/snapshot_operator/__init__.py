"""The operator: turns declared snapshots and restores into orders for the agents."""
