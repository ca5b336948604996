"""A host of its own below a folder: configuration, defaults, driver, runtime folder, one model."""

from __future__ import annotations

import os
import pwd
from contextlib import suppress
from pathlib import Path

import msgspec

from preloadd.admin.world import World
from preloadd.domain.settings import RUNNING, ModelSettings, RankSettings, Running
from preloadd.errors import PreloadError
from preloadd.weights.checkpoint import identities_of
from tests.checkpoints import llama

ME = pwd.getpwuid(os.geteuid()).pw_name


class Host:
    """Files of a host. `world` is how commands see it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "etc/preloadd"
        (self.config / "groups.d").mkdir(parents=True)
        (root / "etc/default").mkdir()
        (root / "state").mkdir(mode=0o750)
        (root / "s").mkdir(mode=0o755)
        self.model = llama(root / "model")
        self.environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(root),
            "PRELOADD_CONFIG_DIR": str(self.config),
        }
        self.host()

    @property
    def world(self) -> World:
        return World(self.environ, self.root)

    def host(self, more: str = "") -> None:
        """Write preloadd.toml with folders of this host."""
        self.write(
            "preloadd.toml",
            f'daemon_user = "{ME}"\nsocket_dir = "{self.root}/s"\nstate_dir = "{self.root}/state"\n'
            + more,
        )

    def write(self, name: str, text: str) -> Path:
        path = self.config / name
        path.write_text(text)
        return path

    def group(self, name: str = "a", more: str = "", gpus: str = '["CPU-0"]') -> Path:
        """Write a group that serves the model."""
        return self.write(f"groups.d/{name}.toml", f'model = "{self.model}"\ngpus = {gpus}\n{more}')

    def running(
        self, instance: str = "CPU-0", *, group: str = "a", version: str = "0", **model: object
    ) -> Path:
        """Leave what a rank leaves while it runs."""
        folder = self.root / "run/preloadd" / instance
        folder.mkdir(parents=True)
        settings = RankSettings(
            group,
            instance,
            f"{self.root}/s",
            derived=False,
            model=ModelSettings(path=str(model.pop("path", self.model)), name="m", **model),
        )
        path, files = folder / RUNNING, ()
        with suppress(PreloadError):
            files = tuple(identities_of(Path(settings.model.path)))
        path.write_bytes(msgspec.json.encode(Running(version, 1, settings, files=files)))
        return path

    def gpus(self, *uuids: str, minor: int = 0) -> None:
        """Have the driver tell of these GPUs, with nodes from that number on."""
        (self.root / "dev").mkdir(exist_ok=True)
        for number, uuid in enumerate(uuids, minor):
            folder = self.root / f"proc/driver/nvidia/gpus/0000:0{number}:00.0"
            folder.mkdir(parents=True)
            (folder / "information").write_text(
                f"Model: \t\t NVIDIA H200\nGPU UUID: \t {uuid}\nVideo BIOS: \t ??\n"
                f"Device Minor: \t {number}\n"
            )
            (self.root / f"dev/nvidia{number}").touch()
        for name in ("nvidiactl", "nvidia-uvm"):
            (self.root / "dev" / name).touch()
        version = self.root / "proc/driver/nvidia/version"
        version.parent.mkdir(parents=True, exist_ok=True)
        version.write_text(
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"
        )
