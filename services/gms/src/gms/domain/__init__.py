"""Decisions of the GPU memory service: locks, layouts, fences and transfer plans as values."""
