"""The rules that every device keeps, as one table for the tests here and for a GPU elsewhere."""
