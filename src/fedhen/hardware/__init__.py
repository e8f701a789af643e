"""The machine: accelerator, precision, CPU threads, free memory, the most it can compute."""
