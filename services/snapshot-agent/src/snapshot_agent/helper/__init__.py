"""The helper of a node: it dumps and restores processes for the agent, which has no right to."""
