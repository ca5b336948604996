"""The rank daemon: holds one generation's descriptors and hands them out. No torch, no CUDA."""
