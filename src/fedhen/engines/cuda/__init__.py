"""The engine for one GPU: local steps as CUDA graphs on parallel streams, and their kernels."""
