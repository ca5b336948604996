"""The engine's side: find a daemon, take a lease, map the weights. Runs in the engine's process."""
