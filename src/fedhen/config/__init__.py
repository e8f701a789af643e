"""The settings of an experiment, their validation, named recipes, and TOML files."""
