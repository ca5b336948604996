"""In the place of Mooncake, for processes that have this folder on their path."""
