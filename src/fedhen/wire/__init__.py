"""What is sent between the server and the devices, and the codecs that make it smaller."""
