"""The fleet's app, as Flower ships it to server and nodes."""
