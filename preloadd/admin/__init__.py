"""`preloadd admin`: configuration, doctor and tokens, for whoever runs the host."""
