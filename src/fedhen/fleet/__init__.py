"""A real fleet: the same loop, with Flower's nodes as the devices. Here alone a device is a node too."""
