"""fedhen from Python: train your own models on your own data, resume after a crash, load and score saved runs."""
