"""What is made of a declaration: schemas of OpenAPI, and the definitions of an API server."""
