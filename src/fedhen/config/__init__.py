"""Every setting of an experiment, the named recipes, and TOML files with both."""
