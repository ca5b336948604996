"""Groups' files as operators write them."""

from __future__ import annotations

GROUP = 'model = "/srv/m"\ngpus = ["CPU-0"]\n'
SPREAD = """
gpus = ["CPU-{}"]
model = "/srv/m"
[parallel]
tensor_parallel_size = 2
nnodes = 2
node_rank = 0
master_addr = "10.0.0.1"
weight_cache_master_port = {}
"""
"""A group of which this is the first of two nodes: a number and a port are left open."""
