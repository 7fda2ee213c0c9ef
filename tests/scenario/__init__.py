"""Seeded faults in simulated worlds around the real services."""
