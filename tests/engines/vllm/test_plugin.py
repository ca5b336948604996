"""`plugin enable` in an environment with vLLM: every process of it has our loader."""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from preloadd.admin.__main__ import main
from tests.engines.vllm import harness

pytestmark = pytest.mark.slow

LOADER = """
import json, logging, sys
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import get_model_loader
from vllm.plugins import load_general_plugins
load_general_plugins()
import preloadd.loader.vllm.build
loader = type(get_model_loader(LoadConfig(load_format="ipc_cache")))
print(json.dumps({
    "loader": f"{loader.__module__}.{loader.__name__}",
    "log": logging.getLogger("preloadd").parent.name,
    "from": sys.modules[loader.__module__].__file__,
    "daemons": [name for name in ("sdnotify", "typer.main", "rich.table") if name in sys.modules],
}))
"""


@pytest.fixture
def bare(vllm_python, tmp_path) -> Path:
    """An environment with the same vLLM, in which nobody has installed preloadd."""
    venv.create(tmp_path / "v", with_pip=False, symlinks=True)
    release = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    (packages,) = vllm_python.parents[1].glob("lib/python3.*/site-packages")
    if packages.parent.name != release:
        pytest.skip(f"vLLM is for {packages.parent.name}, this is {release}")
    site = tmp_path / "v/lib" / release / "site-packages"
    for one in packages.iterdir():
        if "preloadd" not in one.name:
            (site / one.name).symlink_to(one)
    return tmp_path / "v"


def run(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """A process of that environment, with nothing of ours in its own."""
    python = folder / "bin/python"
    return subprocess.run(
        [python, "-c", script], cwd="/", env=harness.environ(python), capture_output=True, text=True
    )


def test_vllm_registers_our_loader_where_the_plugin_is_enabled(bare, capsys):
    assert main(["plugin", "enable", str(bare)]) == 0
    assert "cannot attach" not in capsys.readouterr().err
    assert main(["plugin", "status", str(bare)]) == 0
    done = run(bare, LOADER)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["loader"] == "preloadd.engine.vllm.loader.PreloaddLoader"
    assert os.path.commonpath([told["from"], bare]) == str(bare)
    assert told["log"] == "vllm"
    assert told["daemons"] == []
    assert main(["plugin", "disable", str(bare)]) == 0
    assert "No module named 'preloadd'" in run(bare, "import preloadd").stderr
