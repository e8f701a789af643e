"""Data sets as tensors in memory, their split over devices, and batches made where the data lies."""
