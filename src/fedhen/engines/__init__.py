"""Who trains the active devices and scores models: one by one, in worker processes, on a GPU, over several ranks."""
