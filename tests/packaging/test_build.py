"""What is built: the same each time, all in its place, and nothing that linters complain of."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.docs.links import dead_links
from tests.packaging import builds, expected
from tests.packaging.builds import Build

CODE = "/usr/lib/preloadd/preloadd"


def told(command: Sequence[str | Path], *, check: bool = True) -> str:
    """What a command says, standard error included."""
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0 or not check, done.stdout
    return done.stdout


@pytest.fixture
def sources(copied: Path, tmp_path: Path) -> Path:
    """The sources, with what stands for wheels."""
    sources = shutil.copytree(copied, tmp_path / "sources")
    for name in ("preloadd-1", "sdnotify-1"):
        (sources / "wheels").mkdir(exist_ok=True)
        with zipfile.ZipFile(sources / f"wheels/{name}.whl", "w") as wheel:
            wheel.writestr(f"{name}.dist-info/METADATA", "")
    (sources / "wheels/sbom.json").touch()
    return sources


def test_the_same_sources_make_the_same_bytes(
    built: Build, copied: Path, sdists: Path, tmp_path: Path
) -> None:
    elsewhere = {"TZ": "Pacific/Auckland", "LANG": "C", "HOME": str(tmp_path), "LC_ALL": "POSIX"}
    again = builds.build(copied, tmp_path / "out", sdists, umask=0o077, environ=elsewhere)
    assert again.sums == built.sums
    kinds = [Path(line.split()[1]).suffix for line in built.sums.splitlines()]
    assert sorted(kinds) == [".deb", ".json", ".rpm", ".whl"]
    told(["sh", "-c", 'cd "$0" && sha256sum --check --strict SHA256SUMS', built.folder])


def test_a_build_needs_a_time(copied: Path, sdists: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [copied / "packaging/build.sh", tmp_path],
        env={"PATH": os.environ["PATH"], "SDISTS": str(sdists)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "SOURCE_DATE_EPOCH" in done.stderr


def test_a_source_that_is_missing_ends_the_build(sources: Path, tmp_path: Path) -> None:
    (sources / "CONTRIBUTING.md").unlink()
    done = subprocess.run(
        [sources / "packaging/build.sh", tmp_path / "out"],
        env={"PATH": os.environ["PATH"], "SOURCE_DATE_EPOCH": "1", "SDISTS": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "CONTRIBUTING.md" in done.stderr
    assert "wheels of" not in done.stderr


def test_a_wheel_that_is_not_the_pinned_one_is_refused(
    copied: Path, sdists: Path, tmp_path: Path
) -> None:
    (other := tmp_path / "sdists").mkdir()
    for file in sdists.iterdir():
        data = file.read_bytes()
        (other / file.name).write_bytes(data + b"x" if file.name.endswith(".gz") else data)
    with pytest.raises(AssertionError, match=r"sdnotify==0\.3\.2"):
        builds.build(copied, tmp_path / "out", other)


def test_a_page_that_is_missing_ends_the_installation(sources: Path, tmp_path: Path) -> None:
    told([sources / "packaging/install.sh", tmp_path / "whole"])
    assert (tmp_path / f"whole{expected.DOC}/packaging/container").is_dir()
    (sources / "CONTRIBUTING.md").unlink()
    with pytest.raises(AssertionError, match=r"CONTRIBUTING\.md"):
        told([sources / "packaging/install.sh", tmp_path / "part"])


def test_an_installation_can_be_repeated_and_has_no_leftovers(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("docs/a.md.orig", "docs/.a.md.swp", "docs/a.md~", "packaging/container/a.rej"):
        (sources / name).touch()
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        told([sources / "packaging/install.sh", "here"])
    assert (tmp_path / "here/usr/bin/preloadd").readlink() == Path("../libexec/preloadd/preloadd")
    installed = {path.name for path in (tmp_path / f"here{expected.DOC}").glob("**/*")}
    assert "operator-guide.md" in installed
    assert not {name for name in installed if name.endswith(("orig", "swp", "~", "rej"))}
    assert not (sources / "here").exists()


@pytest.mark.parametrize("arguments", [[], [""]])
def test_an_installation_needs_a_place(sources: Path, arguments: list[str]) -> None:
    # Without tools, so that one that went on would install nothing on this host.
    command = ["env", "PATH=/nonexistent", "/bin/sh", sources / "packaging/install.sh", *arguments]
    with pytest.raises(AssertionError, match=r"usage: install\.sh DESTDIR"):
        told(command)


def in_wheel(built: Build) -> set[str]:
    """Every file of the package of code."""
    (wheel,) = built.folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    return {f"/usr/lib/preloadd/{name}" for name in names if ".dist-info/" not in name}


def own(version: str) -> dict[str, int]:
    """What tells of the version."""
    folder = f"/usr/lib/preloadd/preloadd-{version}.dist-info"
    return {f"{folder}/METADATA": 0o644, f"{folder}/entry_points.txt": 0o644}


def test_all_code_is_in_the_wheel(built: Build, copied: Path) -> None:
    here = copied / "preloadd"
    written = {f"{CODE}/{path.relative_to(here)}" for path in here.glob("**/*.py")}
    assets = {path for path in in_wheel(built) if not path.endswith(".py")}
    assert in_wheel(built) - assets == written
    assert f"{CODE}/py.typed" in assets


def test_files_of_the_deb(built: Build) -> None:
    found = {}
    for line in told(["dpkg-deb", "--contents", built.deb]).splitlines():
        mode, owner, _, _, _, name, *_ = line.split()
        assert owner == "root/root"
        if not mode.startswith("d"):
            found[name[1:]] = mode[1:]
    wanted = expected.DEB | own(builds.VERSION) | dict.fromkeys(in_wheel(built), 0o644)
    assert found == {name: stat.filemode(mode)[1:] for name, mode in wanted.items()}
    conffiles = told(["dpkg-deb", "--info", built.deb, "conffiles"]).split()
    assert set(conffiles) == expected.CONFFILES | {"/etc/needrestart/conf.d/preloadd.conf"}


def test_files_of_the_rpm(built: Build) -> None:
    query = "[%{FILENAMES} %{FILEMODES:octal} %{FILEUSERNAME} %{FILEGROUPNAME}\\n]"
    found = {}
    for line in told(["rpm", "-qp", "--queryformat", query, built.rpm]).splitlines():
        name, mode, *owner = line.split()
        assert owner == ["root", "root"]
        if not stat.S_ISDIR(int(mode, 8)):
            found[name] = stat.S_IMODE(int(mode, 8))
    assert found == expected.RPM | own(builds.VERSION) | dict.fromkeys(in_wheel(built), 0o644)
    assert set(told(["rpm", "-qp", "--configfiles", built.rpm]).split()) == expected.CONFFILES


@pytest.mark.parametrize("unpack", ['dpkg-deb -x "$1" .', 'rpm2archive -n - <"$1" | tar x'])
def test_links_among_the_pages_lead_somewhere(built: Build, tmp_path: Path, unpack: str) -> None:
    package = built.deb if unpack.startswith("dpkg") else built.rpm
    told(["sh", "-euc", f'cd "$0" && {unpack}', tmp_path, package])
    doc = tmp_path / expected.DOC.lstrip("/")
    pages = list(doc.rglob("*.md"))
    assert doc / "docs/operators/troubleshooting.md" in pages
    assert not [f"{page.relative_to(doc)}: {link}" for page in pages for link in dead_links(page)]


def test_packages_ask_for_no_engine(built: Build) -> None:
    (depends,) = told(["dpkg-deb", "--field", built.deb, "Depends"]).splitlines()
    names = {re.split(r"[ (]", each)[0] for each in re.split(r"\s*[,|]\s*", depends)}
    assert {"python3", "systemd"} <= names
    assert not [name for name in names if not re.match("python3$|systemd", name)]
    needs = {line.split()[0] for line in told(["rpm", "-qp", "--requires", built.rpm]).splitlines()}
    assert {name for name in needs if not name.startswith("rpmlib(")} == {
        *("/bin/sh", "/usr/bin/python3", "config(preloadd)", "python3", "systemd"),
    }


def test_the_bill_of_materials_tells_what_is_carried(built: Build) -> None:
    (path,) = built.folder.glob("*.cdx.json")
    bill = json.loads(path.read_text())
    (wheel,) = built.folder.glob("*.whl")
    digest = told(["sha256sum", wheel]).split()[0]
    root = bill["metadata"]["component"]
    assert (root["name"], root["version"]) == ("preloadd", builds.VERSION)
    assert root["hashes"] == [{"alg": "SHA-256", "content": digest}]
    (carried,) = bill["components"]
    assert carried["purl"] == "pkg:pypi/sdnotify@0.3.2"
    assert carried["licenses"] == [{"license": {"id": "MIT"}}]
    pinned = (builds.ROOT / "packaging/requirements.txt").read_text()
    assert f"--hash=sha256:{carried['hashes'][0]['content']}" in pinned
    assert bill["dependencies"][0] == {"ref": root["bom-ref"], "dependsOn": [carried["bom-ref"]]}
    assert bill["metadata"]["timestamp"] == "2026-09-21T14:13:20Z"


def test_lintian_finds_nothing(built: Build) -> None:
    lintian = ["lintian", "--allow-root", "--fail-on", "error,warning", "--tag-display-limit", "0"]
    assert told([*lintian, "--show-overrides", built.deb]) == ""


def test_rpmlint_finds_nothing(built: Build) -> None:
    config = builds.ROOT / "packaging/rpm/rpmlint.toml"
    said = told(["rpmlint", "--strict", "--config", config, built.rpm])
    assert "0 errors, 0 warnings" in said


@pytest.mark.parametrize(
    "script",
    [
        "build.sh",
        "install.sh",
        *(f"common/{name}" for name in ("preloadctl", "preloadd", "preloadd-python")),
    ],
)
def test_scripts_are_shells(script: str) -> None:
    told(["dash", "-n", builds.ROOT / "packaging" / script])


def test_needrestart_leaves_ranks_alone() -> None:
    """As it reads its files: Perl, in which the names of services are matched."""
    config = builds.ROOT / "systemd/preloadd.needrestart"
    script = """our %nrconf; defined(do $ARGV[0]) or die $@;
    for $unit (@ARGV[1..3]) { for (keys %{$nrconf{override_rc}}) {
      print "$unit $nrconf{override_rc}{$_}\\n" if $unit =~ /$_/ } }"""
    units = ["preloadd@CPU-0.service", "preloadd-supervisor.service", "ssh.service"]
    assert told(["perl", "-e", script, config, *units]) == "preloadd@CPU-0.service 0\n"
