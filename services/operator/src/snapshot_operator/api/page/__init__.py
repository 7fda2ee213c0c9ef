"""The page of what is going on."""
