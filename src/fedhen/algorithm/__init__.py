"""The paper: what a device minimises, how the server merges, and the methods made of the two. Start with `methods`."""
