"""What a fleet's app is told when it is started: the keys of [tool.flwr.app.config]."""

CONFIG, RUN, RESUME = "config", "run", "resume"
"""The configuration as TOML, the run folder on the server, and whether to go on with what is in it."""
