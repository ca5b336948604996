"""What FlashInfer says of this environment, and of tables that come from elsewhere.

Its own rules, where it can be asked. The functions have no public names (read in 0.7.2):
ImportError where they are not there.
"""

from __future__ import annotations

from collections.abc import Mapping


def environment() -> dict[str, str]:
    """What it would write into a table that is tuned here. It may start the GPU's driver."""
    from flashinfer.autotuner.autotuner import _collect_metadata

    return dict(_collect_metadata())


def unused(saved: Mapping[str, str | None], here: Mapping[str, str]) -> list[str]:
    """The fields for which it would not use a table with metadata `saved` here."""
    from flashinfer.autotuner.autotuner import _classify_metadata_mismatches

    hard, soft = _classify_metadata_mismatches(dict(saved), dict(here))
    return sorted({*hard, *soft})
