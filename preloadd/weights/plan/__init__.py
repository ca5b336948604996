"""Which bytes of a checkpoint one rank holds (`select`), and where they go in its arena (`pack`).

Pure: sources, config and placement are values, the plan is a value. Reading the bytes is the
loader's work, reading headers that of `weights.checkpoint`.
"""

from preloadd.weights.plan.families import ARCHITECTURES
from preloadd.weights.plan.packing import ArenaPlan, pack
from preloadd.weights.plan.selection import select
from preloadd.weights.plan.slices import Run, Slice, Source

__all__ = ["ARCHITECTURES", "ArenaPlan", "Run", "Slice", "Source", "pack", "select"]
