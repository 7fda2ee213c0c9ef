"""Pages of docs/ that are made from the code, one module a page: `PAGE`, its file, and `page()`."""
