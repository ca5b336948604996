"""The builder `vllm`: one rank's weights as vLLM itself makes them, moved into an arena."""
