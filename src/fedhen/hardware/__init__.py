"""The machine: accelerator, precision, CPU threads, free memory, peak speed and peak memory."""
