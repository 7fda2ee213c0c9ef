"""The machinery that runs decisions in either world."""
