"""A real fleet: the same loop as in a simulation, with Flower's nodes as the devices."""
