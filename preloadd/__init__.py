"""preloadd: model weights that outlive the engine and the daemon."""

__version__ = "0.1.0"
