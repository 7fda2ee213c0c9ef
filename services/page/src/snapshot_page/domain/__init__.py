"""What the page shows, as functions of values."""
