import hashlib
import io
import os
import socket
from pathlib import Path

import pytest

from preloadd.errors import InsecurePath
from preloadd.warmup.bundles.manifest import BadBundle
from preloadd.warmup.bundles.pack import pack
from tests.bundles import AOT, FILES, IDENTITY, PLAIN, write


def packed(root, *folders):
    out = io.BytesIO()
    return pack(root, folders, IDENTITY, out), out.getvalue()


def test_all_files_are_told(source):
    bundle, raw = packed(source, AOT, PLAIN)
    assert bundle.sha256 == hashlib.sha256(raw).hexdigest()
    assert bundle.nbytes == len(raw) == bundle.manifest.bundle_nbytes
    assert bundle.key == f"vllm-warmup-cache/compile_cache/{bundle.sha256}/bundle.tar"
    told = {one.path: (one.nbytes, one.sha256) for one in bundle.manifest.members}
    assert told == {p: (len(c), hashlib.sha256(c).hexdigest()) for p, c in FILES.items()}
    assert bundle.manifest.identity == IDENTITY


def test_equal_files_make_equal_bytes(source, tmp_path):
    other = tmp_path / "other"
    write(other, dict(reversed(FILES.items())))
    for path in FILES:
        (other / path).chmod(0o755)
        os.utime(other / path, (1, 1))
    assert packed(other, PLAIN, AOT) == packed(source, AOT, PLAIN)


def test_what_passes_is_left_out(source):
    before = packed(source, AOT)
    write(source, {f"{AOT}/inductor_cache/locks/x.lock": b"", f"{AOT}/rank_0_0/model.9.tmp": b"x"})
    assert packed(source, AOT) == before


def test_links_are_refused_by_name(source):
    (source / AOT / "rank_0_0/link").symlink_to("model")
    with pytest.raises(InsecurePath, match=r"rank_0_0/link"):
        packed(source, AOT)


def test_so_are_linked_folders(source):
    (source / AOT / "inductor_cache/5v").symlink_to("5u")
    with pytest.raises(InsecurePath, match=r"inductor_cache/5v"):
        packed(source, AOT)


def test_and_a_link_in_the_place_of_a_whole_folder(source):
    (source / AOT).rename(source / "elsewhere")
    (source / AOT).symlink_to(source / "elsewhere")
    with pytest.raises(InsecurePath, match="5a5a5a"):
        packed(source, AOT)


def test_devices_and_sockets_are_refused_by_name(source, socket_dir):
    os.mkfifo(source / AOT / "pipe")
    with pytest.raises(InsecurePath, match="pipe"):
        packed(source, AOT)
    (source / AOT / "pipe").unlink()
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(socket_dir / "s"))
        (socket_dir / "s").rename(source / AOT / "socket")
    with pytest.raises(InsecurePath, match="socket"):
        packed(source, AOT)


@pytest.mark.parametrize("folder", ["torch_compile_cache", "..", "/etc", f"{AOT}/rank_0_0"])
def test_only_whole_folders_of_the_compile_cache_are_packed(source, folder):
    with pytest.raises(BadBundle):
        packed(source, folder)


def test_names_that_would_not_be_installed_are_not_packed(source):
    write(source, {f"{AOT}/a name": b""})
    with pytest.raises(BadBundle, match="a name"):
        packed(source, AOT)


def test_a_folder_that_is_not_there_is_told(source):
    with pytest.raises(FileNotFoundError, match="9876543210"):
        packed(source, "torch_compile_cache/9876543210")


def test_nothing_is_no_bundle(source):
    (source / "torch_compile_cache/9876543210").mkdir()
    with pytest.raises(BadBundle, match="0 files"):
        packed(source, "torch_compile_cache/9876543210")


@pytest.mark.parametrize("other", [b"shorter", b"equal" * 1000, b"longer" * 1000])
def test_a_cache_that_is_being_written_is_not_packed(source, other):
    """An engine writes the last file when the first one has been read."""

    class Out(io.BytesIO):
        def write(self, data):
            model = source / AOT / "rank_0_0/model"
            if model.read_bytes() != other:
                model.write_bytes(other)
            return super().write(data)

    with pytest.raises(BadBundle, match=r"rank_0_0/model changed meanwhile"):
        pack(source, [AOT], IDENTITY, Out())


def test_what_is_too_much_is_not_read(source):
    (source / AOT / "huge").touch()
    os.truncate(source / AOT / "huge", 1 << 40)
    with pytest.raises(BadBundle, match=r"huge has 1,099,511,627,776 bytes"):
        packed(source, AOT)


@pytest.mark.slow
def test_all_of_it_together_may_not_be_too_much_either(source):
    for name in ("a", "b"):
        (source / AOT / name).touch()
        os.truncate(source / AOT / name, 200 << 20)
    with (
        Path(os.devnull).open("wb") as nowhere,
        pytest.raises(BadBundle, match="more than 268,435,456"),
    ):
        pack(source, [AOT], IDENTITY, nowhere)


def test_a_root_of_everybody_is_refused(source):
    source.chmod(0o777)
    with pytest.raises(InsecurePath, match="go-w"):
        packed(source, AOT)


def test_a_pipe_that_takes_the_place_of_a_file_stops_nobody(source):
    class Out(io.BytesIO):
        def write(self, data):
            model = source / AOT / "rank_0_0/model"
            if model.is_file():
                model.unlink()
                os.mkfifo(model)
            return super().write(data)

    with pytest.raises(InsecurePath, match=r"rank_0_0/model"):
        pack(source, [AOT], IDENTITY, Out())
