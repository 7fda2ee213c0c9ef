"""The machine and the operator as the command line meets them."""
