"""The engine for one GPU: captured steps on streams side by side, and the kernels they are made of."""
