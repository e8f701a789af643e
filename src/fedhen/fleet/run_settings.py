"""What a fleet's app is told when it is started, the keys of [tool.flwr.app.config], and what it says in the end."""

CONFIG, RUN, RESUME = "config", "run", "resume"
"""The configuration as TOML, the run folder on the server, and whether to go on with what is in it."""
START_ANOTHER_RUN = "start another run"
"""The end of its last words where it is of no use to go on with the run."""
