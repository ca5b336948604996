"""What runs in an engine's environment needs nothing that only the daemons' environment has."""

import subprocess
import sys

import pytest

IMPORTS = """
import importlib, pkgutil, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in REFUSED:
            raise AssertionError(f"{name} is imported")

REFUSED = {"sdnotify", "typer", "fastapi", "rich", "uvicorn", "pydantic", "anyio"}
sys.meta_path.insert(0, Refuse())
import preloadd.engine, preloadd.frameworks, preloadd.loader
for package in (preloadd.engine, preloadd.frameworks, preloadd.loader):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if found.name == "preloadd.engine.transformers":
            continue  # and all that transformers imports
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            # What only such an environment has.
            if error.name.partition(".")[0] not in {"vllm", "instanttensor"}:
                raise
        print(found.name)
"""


@pytest.mark.slow
def test_neither_engines_nor_loaders_import_what_only_daemons_have() -> None:
    """What they import of vLLM and transformers, and that in turn, is their own business."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {"preloadd.engine.vllm.plugin", "preloadd.loader.__main__"} <= {*done.stdout.split()}
