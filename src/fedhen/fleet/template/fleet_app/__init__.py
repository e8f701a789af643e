"""The fleet's app, which Flower ships to the server and the nodes."""
