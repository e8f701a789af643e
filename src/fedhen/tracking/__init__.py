"""Who is shown the progress of a run: the terminal."""
