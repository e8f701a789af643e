"""Safe reading and writing of files: atomic writes, locks, untrusted input, work in the background."""
