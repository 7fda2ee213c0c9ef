"""What every Snapback service shares: the objects, the wire, the bus and the storage layout."""
