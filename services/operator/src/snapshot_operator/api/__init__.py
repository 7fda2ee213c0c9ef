"""What people, nodes and programs ask the operator."""
