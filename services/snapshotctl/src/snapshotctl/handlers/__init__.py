"""What each command does, in terms of the ports."""
