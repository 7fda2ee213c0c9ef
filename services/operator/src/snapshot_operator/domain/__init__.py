"""Pure decisions of the operator."""
