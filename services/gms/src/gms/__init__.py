"""The GPU memory service: owns device memory and moves it between device, host and disk."""
