"""Tells as JSON what vLLM's parser knows, and how it understands the lines on its input."""

from __future__ import annotations

import json
import sys

from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main() -> int:
    """Standard input is a list of command lines, each a list of words."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    short = {
        option.removeprefix("-"): next(o for o in action.option_strings if o.startswith("--"))
        for action in parser._actions
        for option in action.option_strings
        if not option.startswith("--")
    }
    understood = [
        {name: repr(value) for name, value in vars(parser.parse_args(words)).items()}
        for words in json.load(sys.stdin)
    ]
    names = sorted(parser._option_string_actions)
    sys.stdout.write(json.dumps({"short": short, "names": names, "understood": understood}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
