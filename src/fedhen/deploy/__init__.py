"""Files that run on devices: ONNX and ExecuTorch, int8, early exits, checked in their runtimes."""
