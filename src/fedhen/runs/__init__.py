"""The run folder on disk: its layout, its writer and its reader. Needs no torch."""
