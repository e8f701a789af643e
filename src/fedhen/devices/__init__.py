"""The population of devices: what each has, holds and minimises, and the state that is kept for each."""
