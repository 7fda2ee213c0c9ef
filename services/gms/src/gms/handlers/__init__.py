"""What arrives at the service: sessions, control calls and orders."""
