"""One experiment from its configuration to its last round: built, played, saved, resumed."""
