"""Who is told about the rounds of a run: the display, users' callbacks, and trackers such as TensorBoard and MLflow."""
