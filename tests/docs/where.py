"""Where each block of commands is run, or why it is not: every one is in exactly one of these.

Blocks of one list are run in its order, as they stand there, in one machine.
"""

from __future__ import annotations

_OPERATORS = "docs/operators"

HOST = (
    f"{_OPERATORS}/install.md#without-a-package",
    f"{_OPERATORS}/first-group.md#the-first-group/2",
    f"{_OPERATORS}/first-group.md#the-first-group/3",
    "README.md#serve-a-model/2",
    f"{_OPERATORS}/first-group.md#let-engines-in/2",
    f"{_OPERATORS}/first-group.md#start-an-engine",
    "docs/protocol.md#example/2",
    f"{_OPERATORS}/preloadctl.md#what-is-wrong",
    f"{_OPERATORS}/monitoring.md#monitoring",
    f"{_OPERATORS}/monitoring.md#logs",
    f"{_OPERATORS}/systemd.md#logs",
    f"{_OPERATORS}/configuration.md#changing-it",
    f"{_OPERATORS}/configuration.md#tokens",
    f"{_OPERATORS}/caches.md#a-folder",
    f"{_OPERATORS}/seeding.md#two-hosts/2",
    f"{_OPERATORS}/seeding.md#tls",
    f"{_OPERATORS}/troubleshooting.md#troubleshooting-by-symptom",
    f"{_OPERATORS}/troubleshooting.md#ask-for-help",
    f"{_OPERATORS}/upgrade.md#upgrade-and-roll-back/2",
    f"{_OPERATORS}/systemd.md#restarts-and-giving-up",
    "docs/user-guide.md#release-and-load",
    f"{_OPERATORS}/systemd.md#take-a-group-away",
    f"{_OPERATORS}/install.md#uninstall/2",
)
"""A host that was set up without a package: `test_host.py`."""

PACKAGED = (
    f"{_OPERATORS}/install.md#packages",
    f"{_OPERATORS}/install.md#deb",
    f"{_OPERATORS}/install.md#the-interpreter",
    f"{_OPERATORS}/upgrade.md#upgrade-and-roll-back",
    f"{_OPERATORS}/upgrade.md#roll-back",
    f"{_OPERATORS}/install.md#uninstall",
)
"""A host with the package for Debian: `tests/packaging/test_pages.py`."""

_GPU = "it needs a GPU"
_REGISTRY = "machines of tests reach no package registry"
_VLLM = "it serves for ever, a model of 16 GB"
_DOCKER = (
    "it needs docker or podman; as far as it can be done without: tests/docs/test_container.py"
)
_NODES = "it needs that model and nodes"
_TWO = "it needs that model and two hosts"

NOT_ON_CI = {
    "README.md#preloadd": "CI runs the second; of the first, the model is made: "
    "tests/engines/test_demo_model.py",
    "README.md#serve-a-model": "it stays in the foreground: tests/process/test_run.py",
    "README.md#attach-an-engine": f"{_GPU}; in host memory: tests/engines/test_transformers.py",
    "docs/user-guide.md#serving-a-model-preloadd-run": "it stays in the foreground: "
    "tests/process/test_run.py",
    "docs/user-guide.md#attaching-an-engine": f"{_GPU}: tests/engines/test_transformers.py",
    "docs/user-guide.md#attaching-an-engine/2": f"{_GPU}: tests/gpu/test_attach.py",
    "docs/with-vllm.md#three-commands": f"{_GPU}: tests/engines/vllm/test_serve.py",
    "docs/with-vllm.md#the-plugin": "it needs a vLLM: tests/engines/vllm/test_plugin.py",
    "docs/with-vllm.md#options-of-the-engine": f"{_VLLM}: tests/engines/vllm/test_serve.py",
    "docs/with-vllm.md#on-cpus": "it serves for ever: tests/engines/vllm/test_serve.py",
    "docs/releasing.md#checklist": "it clones with git: tests/packaging/test_build.py",
    f"{_OPERATORS}/bundles.md#installed-but-not-used": "bundles are compiled for a GPU",
    f"{_OPERATORS}/caches.md#warm-up-caches": "tables that were tuned on a GPU: "
    "tests/unit/admin/test_cache_commands.py",
    f"{_OPERATORS}/caches.md#tuned-at-preload-time": f"{_GPU}: "
    "tests/engines/test_flashinfer_autotune.py",
    f"{_OPERATORS}/caches.md#mooncake": "a line of a file",
    f"{_OPERATORS}/configuration.md#models-by-id": f"{_REGISTRY}, nor one of models",
    f"{_OPERATORS}/containers.md#engines-in-containers-ranks-of-systemd": _DOCKER,
    f"{_OPERATORS}/containers.md#an-image": _DOCKER,
    f"{_OPERATORS}/containers.md#an-image/2": _DOCKER,
    f"{_OPERATORS}/containers.md#a-daemon-in-a-container": _DOCKER,
    f"{_OPERATORS}/gpus.md#what-it-takes": _REGISTRY,
    f"{_OPERATORS}/gpus.md#what-it-takes/3": _GPU,
    f"{_OPERATORS}/gpus.md#persistence-mode": _GPU,
    f"{_OPERATORS}/gpus.md#persistence-mode/2": _GPU,
    f"{_OPERATORS}/install.md#rpm": "machines are of Debian: tests/packaging/test_rpm.py",
    f"{_OPERATORS}/install.md#the-interpreter/2": _REGISTRY,
    f"{_OPERATORS}/install.md#selinux": "there is no SELinux",
    f"{_OPERATORS}/monitoring.md#prometheus-and-grafana/2": "where there is a promtool: "
    "tests/unit/supervisor/test_queries.py",
    f"{_OPERATORS}/nodes.md#examples": _NODES,
    f"{_OPERATORS}/nodes.md#examples/2": _NODES,
    f"{_OPERATORS}/nodes.md#examples/3": _NODES,
    f"{_OPERATORS}/seeding.md#two-hosts/4": f"{_TWO}: tests/unit/rank/seeding/test_ends.py",
    f"{_OPERATORS}/seeding.md#two-hosts/5": f"{_TWO}: tests/process/test_seeding.py",
    f"{_OPERATORS}/vllm-preload.md#from-vllm-preload-to-preloadd": "it is another program",
    f"{_OPERATORS}/vllm-preload.md#from-vllm-preload-to-preloadd/2": _GPU,
}
"""A reason each, and the test that does the same as far as CI can."""
