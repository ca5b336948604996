"""The loader: fills an arena under the engine's Python, hands it to its rank and exits."""
