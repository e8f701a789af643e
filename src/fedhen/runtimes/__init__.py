"""Who trains the active devices. The round loop never knows which."""
