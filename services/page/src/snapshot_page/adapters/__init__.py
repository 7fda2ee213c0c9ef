"""Where the page reads from."""
