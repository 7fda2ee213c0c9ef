"""What arrives at the agent, and what it does with it."""
