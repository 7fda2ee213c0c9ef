"""The documentation as a site: `staging` lays out what is rendered, `versions` lists versions."""
