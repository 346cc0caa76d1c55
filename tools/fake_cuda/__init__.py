"""Steps on CUDA tensors without data, on a machine without a GPU."""
