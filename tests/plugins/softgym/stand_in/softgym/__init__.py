"""A stand-in for SoftGym, which needs CUDA: the same interface around particles on a line."""
