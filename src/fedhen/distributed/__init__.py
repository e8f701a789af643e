"""Communication between the processes that play one run together."""
