"""Doctor by itself: `/usr/bin/python3 -m preloadd.admin.doctor [--json]`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from preloadd.admin.columns import columns
from preloadd.admin.doctor import diagnose
from preloadd.admin.findings import as_json, as_table, has_fault
from preloadd.admin.world import World
from preloadd.errors import EXIT_STATUS, ErrorCode


def main(arguments: Sequence[str] | None = None) -> int:
    """Tell what was found; 78 if something does not work."""
    parser = argparse.ArgumentParser("preloadctl doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="tell it as JSON")
    options = parser.parse_args(arguments)
    findings = diagnose(World(dict(os.environ)))
    sys.stdout.write(as_json(findings) if options.json else as_table(findings, columns()))
    return EXIT_STATUS[ErrorCode.CONFIG] if has_fault(findings) else 0


if __name__ == "__main__":
    sys.exit(main())
