"""Where the progress of a run is shown: the terminal."""
