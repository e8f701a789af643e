"""The settings with which a fleet's app is started, and the end of its last message."""

CONFIG, RUN, RESUME, DELIVER = "config", "run", "resume", "deliver"
"""Keys of [tool.flwr.app.config]: the configuration as TOML, the run folder on the server, whether to resume it, and
whether to send its models to the nodes instead of playing it."""
START_ANOTHER_RUN = "start another run"
"""The end of the app's last message if the run cannot be resumed."""
