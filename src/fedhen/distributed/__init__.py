"""Several processes that play one run together: what they send each other."""
