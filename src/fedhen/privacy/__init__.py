"""How much one device can change or reveal: bounded updates, differential privacy, and attacks to try them on."""
