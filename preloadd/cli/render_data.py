"""Values for programs: everything that a table shows, and what it leaves out."""

from __future__ import annotations

import json
from dataclasses import asdict

from preloadd.cli import yaml
from preloadd.cli.overview import Overview
from preloadd.cli.views import Leases, Versions

Value = Overview | Leases | Versions


def as_json(value: Value, *, one_line: bool = False) -> str:
    """`value` as JSON text."""
    return json.dumps(asdict(value), indent=None if one_line else 2) + "\n"


def as_yaml(value: Value) -> str:
    """`value` as a YAML document."""
    return "---\n" + yaml.dump(asdict(value))
