"""Tuning FlashInfer for the shard that a rank holds, once, when its weights were just loaded.

`problems` says what is to be tuned, and is pure; `gemms` alone calls FlashInfer's kernels.
"""
