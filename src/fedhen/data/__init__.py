"""Data sets as tensors in memory, their split over devices, batches and augmentation."""
