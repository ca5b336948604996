"""Memory of NVIDIA GPUs. `driver` alone knows CUDA; `keeper` does without, for a rank has none."""
