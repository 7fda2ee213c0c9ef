"""What the agent uses of the machine, one tool each."""
