"""Objects, orders and traces as people read them. No I/O, no clock."""
