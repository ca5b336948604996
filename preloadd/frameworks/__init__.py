"""What loader and engine must do identically."""
