"""What is on disk and who needs which part of it; no torch."""
