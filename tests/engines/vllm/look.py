"""Has vLLM look at the classes of models, named as arguments, and keep what it saw.

Left to itself it starts a process for each that it has not seen, which takes many seconds.
"""

from __future__ import annotations

import sys

from vllm.model_executor.models import registry


def main() -> int:
    """Look at each in this process."""
    registry._run_in_subprocess = lambda look: look()
    for name in sys.argv[1:]:
        registry.ModelRegistry.models[name].inspect_model_cls()
    return 0


if __name__ == "__main__":
    sys.exit(main())
