"""Profiles of devices: how fast each class of devices computes and sends, and what that costs in seconds and joules."""
