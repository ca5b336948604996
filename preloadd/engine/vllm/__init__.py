"""vLLM as an engine: its load format `ipc_cache`, from preloadd's daemons."""
