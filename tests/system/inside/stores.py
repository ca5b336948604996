"""Run in the place of a rank: keeps something in its stores, finds it again, and tells on line."""

import json
import os
import sys
import time

from preloadd.warmup.stores.opening import open_stores

KEY = "vllm-warmup-cache/kind/hash/name.json"

with open_stores(sys.argv[1:], os.environ) as stores:
    until = time.monotonic() + 10
    stores.keep(KEY, b"value")
    while stores.faults and time.monotonic() < until:
        time.sleep(0.5)
        stores.keep(KEY, b"value")
    found = stores.find(KEY)
    print(json.dumps([found == b"value", stores.faults]), flush=True)
