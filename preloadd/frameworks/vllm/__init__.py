"""What loader and engine must do identically with a vLLM of 0.30 or newer."""
