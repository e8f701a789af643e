"""Engines train the active devices and score models: one by one, in worker processes, on a GPU, over several ranks."""
