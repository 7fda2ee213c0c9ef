"""The machine, and the operator over NATS."""
