"""One experiment from its configuration to its last round: builds, plays, saves and resumes it."""
