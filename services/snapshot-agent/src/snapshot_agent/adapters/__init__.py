"""Implementations of the ports, one for each tool or neighbour of the agent."""
