"""The documentation as a site: `staging` lays out what is rendered, `versions` what is beside it."""
