"""What a package puts where. The code itself is whatever the wheel of the version has."""

from __future__ import annotations

from tests.packaging.builds import ROOT

DOC = "/usr/share/doc/preloadd"
PAGES = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md"),
    *(file.relative_to(ROOT).as_posix() for file in ROOT.glob("docs/**/*") if file.is_file()),
    *(f"packaging/container/{name}" for name in ("Containerfile", "compose.yaml", "pod.yaml")),
)
"""All that is to be read, named as in the checkout."""

UNITS = (
    *("preloadd-down@.service", "preloadd-gate@.service", "preloadd-group@.target"),
    *("preloadd-ready.service", "preloadd-supervisor.service", "preloadd.target"),
    "preloadd@.service",
)

COMMON = {
    "/etc/default/preloadd": 0o644,
    "/etc/preloadd/groups.d/example.toml.example": 0o644,
    "/etc/preloadd/preloadd.toml": 0o644,
    "/usr/bin/preloadctl": 0o755,
    "/usr/bin/preloadd": 0o777,
    "/usr/lib/preloadd/bundled/sdnotify-0.3.2.dist-info/METADATA": 0o644,
    "/usr/lib/preloadd/bundled/sdnotify/__init__.py": 0o644,
    **{f"/usr/lib/systemd/system/{unit}": 0o644 for unit in UNITS},
    "/usr/lib/systemd/system-generators/preloadd-generator": 0o755,
    "/usr/lib/systemd/system-preset/50-preloadd.preset": 0o644,
    "/usr/lib/sysusers.d/preloadd.conf": 0o644,
    "/usr/lib/tmpfiles.d/preloadd.conf": 0o644,
    "/usr/libexec/preloadd/preloadd": 0o755,
    "/usr/libexec/preloadd/preloadd-python": 0o755,
    "/usr/share/bash-completion/completions/preloadctl": 0o644,
    f"{DOC}/preloadd.cdx.json": 0o644,
    **{f"{DOC}/{page}": 0o644 for page in PAGES},
    "/usr/share/man/man1/preloadctl.1.gz": 0o644,
    "/usr/share/man/man8/preloadd.8.gz": 0o644,
}
"""Every file by its mode; a link has them all."""

DEB = COMMON | {
    "/etc/needrestart/conf.d/preloadd.conf": 0o644,
    f"{DOC}/changelog.gz": 0o644,
    f"{DOC}/copyright": 0o644,
}

RPM = COMMON | {
    "/usr/share/licenses/preloadd/LICENSE": 0o644,
    "/usr/share/licenses/preloadd/copyright": 0o644,
}

CONFFILES = {
    "/etc/default/preloadd",
    "/etc/preloadd/groups.d/example.toml.example",
    "/etc/preloadd/preloadd.toml",
}
"""Files that an administrator edits, and no package overwrites."""
