"""Stores of a group, tried by the daemons' interpreter as their user."""

import sys

from preloadd.admin.check import check
from preloadd.config.host import survey


def faults(host) -> list[str]:
    found = check(survey(host.config, host.world.daemon_environ()), host.world).faults
    return [str(fault).replace(f"{host.config}/", "") for fault in found]


def test_a_folder_that_is_there(host):
    folder = host.root / "cache"
    folder.mkdir()
    host.group(more=f'[warmup]\nstores = ["file:{folder}"]\n')
    assert faults(host) == []


def test_every_store_that_cannot_be_used_is_told(host):
    none = f"file:{host.root}/none"
    host.group(more=f'[warmup]\nstores = ["moncake", "{none}"]\n')
    assert faults(host) == [
        f"groups.d/a.toml: warmup.stores: {told}"
        for told in (
            "moncake: there is no store 'moncake' (did you mean 'mooncake'?)",
            f"{none}: there is no such folder (create or mount it)",
        )
    ]


def test_what_the_environment_of_daemons_says_counts_not_ones_own(host, monkeypatch):
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", "/mine.json")
    host.group(more=f'python = "{sys.executable}"\n[warmup]\nstores = ["mooncake"]\n')
    (fault,) = faults(host)
    assert "mooncake: MOONCAKE_CONFIG_PATH is not set (name the file" in fault
    (host.root / "etc/default/preloadd").write_text("MOONCAKE_CONFIG_PATH=/theirs.json\n")
    (fault,) = faults(host)
    assert "/theirs.json cannot be read (No such file or directory) (name a file" in fault
