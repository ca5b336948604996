import hashlib
import io
import os
import random
import resource
import stat
import subprocess
import sys
import tarfile
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from preloadd.errors import InsecurePath
from preloadd.warmup.bundles import ustar
from preloadd.warmup.bundles.install import Installed, InTheWay, install, missing
from preloadd.warmup.bundles.manifest import BadBundle, Bundle, Manifest, Member
from preloadd.warmup.bundles.pack import pack
from tests.bundles import AOT, FILES, IDENTITY, PLAIN, contents, write


def put(root, bundle, raw):
    return install(root, bundle, io.BytesIO(raw))


def honest(bundle, raw):
    """The bundle as somebody would tell of it who made `raw`."""
    return replace(bundle, sha256=hashlib.sha256(raw).hexdigest(), nbytes=len(raw))


def test_what_was_packed_is_installed(packed, target):
    bundle, raw = packed
    assert missing(target, bundle.manifest) == (PLAIN, AOT)
    assert put(target, bundle, raw) == Installed((PLAIN, AOT), (PLAIN, AOT))
    assert contents(target) == FILES
    assert missing(target, bundle.manifest) == ()


def test_and_packs_to_the_same_bytes(packed, target):
    bundle, raw = packed
    put(target, bundle, raw)
    out = io.BytesIO()
    assert pack(target, [AOT, PLAIN], IDENTITY, out) == bundle
    assert out.getvalue() == raw


def test_it_is_private_whatever_the_mask(packed, target):
    before = os.umask(0o777)
    try:
        target.mkdir()
        target.chmod(0o700)
        put(target, *packed)
    finally:
        os.umask(before)
    modes = {(p.is_dir(), stat.S_IMODE(p.stat().st_mode)) for p in target.rglob("*")}
    assert modes == {(True, 0o700), (False, 0o600)}


def test_a_second_time_nothing_is_written(packed, target):
    put(target, *packed)
    before = {path: path.stat() for path in target.rglob("*")}
    assert put(target, *packed) == Installed((PLAIN, AOT), ())
    after = {path: path.stat() for path in target.rglob("*")}
    assert [s.st_ino for s in after.values()] == [s.st_ino for s in before.values()]
    assert contents(target) == FILES


def test_what_engines_added_does_not_matter(packed, target):
    put(target, *packed)
    write(target, {f"{AOT}/inductor_cache/locks/x.lock": b"", f"{AOT}/inductor_cache/more": b"1"})
    assert put(target, *packed).new == ()


def test_what_is_there_is_kept(packed, target):
    ours = {f"{AOT}/rank_0_0/model": b"ours"}
    write(target, ours)
    with pytest.raises(InTheWay, match=rf"{AOT} is there already, with another .*remove it"):
        put(target, *packed)
    assert contents(target) == ours


def test_a_file_in_the_place_of_a_folder_is_kept(packed, target):
    ours = {AOT: b"a file"}
    write(target, ours)
    with pytest.raises(InsecurePath, match=AOT):
        put(target, *packed)
    assert contents(target) == ours


def test_what_was_interrupted_is_completed(packed, target):
    """One of the folders is there, as if the other had not got its name any more."""
    write(target, {path: data for path, data in FILES.items() if path.startswith(PLAIN)})
    (target / "torch_compile_cache/.preloadd-0123").mkdir()
    (target / "torch_compile_cache/.preloadd-0123/model").write_bytes(b"half")
    assert put(target, *packed).new == (AOT,)
    assert contents(target) == FILES


def test_other_folders_stay(packed, target):
    other = {"torch_compile_cache/9876543210/a": b"1", "torch_compile_cache/other/b": b"2"}
    write(target, other)
    put(target, *packed)
    assert contents(target) == FILES | other


KILLED = """
import io, os, pathlib, sys
from preloadd.warmup.bundles import install
from preloadd.warmup.bundles.pack import pack
from tests.bundles import AOT, IDENTITY, PLAIN
source, target, at = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3])
count, (out, real) = 0, (io.BytesIO(), {})
bundle = pack(source, [AOT, PLAIN], IDENTITY, out)
def counted(name):
    real[name] = getattr(os, name)
    def call(*a, **k):
        global count
        count += 1
        if count == at:
            os._exit(9)
        return real[name](*a, **k)
    setattr(os, name, call)
for name in sys.argv[4:]:
    counted(name)
install.install(target, bundle, out)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("step", "calls"), [(1, ["rename"]), (17, ["mkdir", "open", "fsync"])])
def test_killed_anywhere_it_leaves_whole_folders_or_none(source, target, packed, step, calls):
    """In the place of the first such call, then of the one `step` later, until it gets through."""
    done, at = 1, 1
    while done:
        argv = [sys.executable, "-c", KILLED, str(source), str(target), str(at), *calls]
        done = subprocess.run(argv, env={"PYTHONPATH": os.pathsep.join(sys.path)}).returncode
        assert done in (0, 9)
        for folder in (AOT, PLAIN):
            if (target / folder).exists():
                whole = {path: data for path, data in FILES.items() if path.startswith(folder)}
                assert contents(target).items() >= whole.items()
        at += step
    assert at > 1 + 2 * step
    assert put(target, *packed).new == ()
    assert contents(target) == FILES


def test_a_disk_without_room_is_left_as_it_was(packed, target):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            put(target, *packed)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert contents(target) == {}


def test_if_one_folder_cannot_be_put_in_place_none_is(packed, target, monkeypatch):
    """An engine makes the second folder while the first gets its name."""
    real = os.rename

    def rename(old, new, **places):
        if new == "5a" * 32 and old == "1":
            write(target, {f"{AOT}/rank_0_0/model": b"ours"})
        real(old, new, **places)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(InTheWay, match=f"{AOT} has come to be there"):
        put(target, *packed)
    assert contents(target) == {f"{AOT}/rank_0_0/model": b"ours"}


# ---- attacks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["torch_compile_cache", "torch_compile_cache/torch_aot_compile"])
def test_no_link_is_followed(packed, target, tmp_path, where):
    outside = tmp_path / "outside"
    outside.mkdir()
    (target / where).parent.mkdir(parents=True)
    (target / where).symlink_to(outside)
    with pytest.raises(InsecurePath, match="link"):
        put(target, *packed)
    assert contents(outside) == {}


def test_nor_one_to_a_whole_folder(packed, target, tmp_path):
    (target / AOT).parent.mkdir(parents=True)
    (target / AOT).symlink_to(tmp_path)
    with pytest.raises(InsecurePath, match="link"):
        put(target, *packed)


@pytest.mark.parametrize("where", ["", "torch_compile_cache"])
def test_nothing_is_put_where_others_can_write(packed, target, where):
    (target / where).mkdir(parents=True)
    (target / where).chmod(0o777)
    with pytest.raises(InsecurePath, match="chmod go-w"):
        put(target, *packed)
    assert contents(target) == {}


def test_first_its_length(packed, target):
    bundle, raw = packed
    for wrong in (raw[:-1], raw + b"\0", b""):
        with pytest.raises(BadBundle, match=f"has {len(wrong):,} bytes"):
            put(target, bundle, wrong)
        with pytest.raises(BadBundle, match="its manifest makes"):
            put(target, honest(bundle, wrong), wrong)
    assert not target.exists()


def test_then_its_digest(packed, target):
    bundle, raw = packed
    with pytest.raises(BadBundle, match="its digest"):
        put(target, bundle, bytes(len(raw)))
    assert not target.exists()


def test_then_each_file(packed, target):
    bundle, raw = packed
    at = raw.index(b"model" * 1000)
    other = raw[:at] + b"other" + raw[at + 5 :]
    with pytest.raises(BadBundle, match=r"rank_0_0/model in it is not the file"):
        put(target, honest(bundle, other), other)
    assert contents(target) == {}


def tarred(kind, *, name=None, link="", tar_format=tarfile.USTAR_FORMAT, **more):
    """A tar of the two files in `PLAIN`, of which the last one is something else."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tar_format) as tar:
        for path, data in sorted(FILES.items())[:2]:
            one = tarfile.TarInfo(path)
            one.size, one.mode = len(data), 0o600
            if data == b"{}":
                one.name, one.type, one.linkname = name or path, kind, link
                for field, value in more.items():
                    setattr(one, field, value)
                if kind != tarfile.REGTYPE:
                    one.size = 0
            tar.addfile(one, io.BytesIO(data))
    return out.getvalue()


ATTACKS = {
    "symbolic link": tarred(tarfile.SYMTYPE, link="/etc/passwd"),
    "hard link": tarred(tarfile.LNKTYPE, link=f"{PLAIN}/rank_0_0/backbone/empty"),
    "character device": tarred(tarfile.CHRTYPE, devmajor=1, devminor=3),
    "block device": tarred(tarfile.BLKTYPE, devmajor=8),
    "pipe": tarred(tarfile.FIFOTYPE),
    "folder": tarred(tarfile.DIRTYPE),
    "contiguous": tarred(tarfile.CONTTYPE),
    "sparse": tarred(tarfile.GNUTYPE_SPARSE),
    "old regular": tarred(tarfile.AREGTYPE),
    "absolute": tarred(tarfile.REGTYPE, name="/etc/cron.d/x"),
    "parent": tarred(tarfile.REGTYPE, name=f"{PLAIN}/../../../x"),
    "elsewhere": tarred(tarfile.REGTYPE, name="flashinfer_autotune_cache/x"),
    "twice": tarred(tarfile.REGTYPE, name=f"{PLAIN}/rank_0_0/backbone/empty"),
    "long name of GNU": tarred(
        tarfile.REGTYPE, name=f"{PLAIN}/{'x' * 150}", tar_format=tarfile.GNU_FORMAT
    ),
    "name in pax": tarred(
        tarfile.REGTYPE, tar_format=tarfile.PAX_FORMAT, pax_headers={"path": "../../x"}
    ),
    "size in pax": tarred(
        tarfile.REGTYPE, tar_format=tarfile.PAX_FORMAT, pax_headers={"size": "9"}
    ),
    "sparse in pax": tarred(
        tarfile.REGTYPE,
        tar_format=tarfile.PAX_FORMAT,
        pax_headers={"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "x"},
    ),
    "set-user-id": tarred(tarfile.REGTYPE, mode=0o4755),
    "owner": tarred(tarfile.REGTYPE, uid=1000, uname="x"),
    "time": tarred(tarfile.REGTYPE, mtime=5),
}


@pytest.fixture
def small(source):
    """The bundle of the two files in `PLAIN`."""
    out = io.BytesIO()
    return pack(source, [PLAIN], IDENTITY, out), out.getvalue()


def test_a_tar_of_plain_files_is_taken(small, target):
    """So what is refused below is so for what is odd about it."""
    bundle, raw = small
    assert tarred(tarfile.REGTYPE)[: len(raw)] == raw
    assert put(target, bundle, raw).new == (PLAIN,)


@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_but_the_plain_files_of_the_manifest_is_taken(small, target, tmp_path, attack):
    """Whoever made it tells length and digest as they are, and the manifest of the files."""
    bundle, raw = small
    wrong = ATTACKS[attack][: len(raw)]
    assert len(wrong) == len(raw)
    before = contents(tmp_path)
    with pytest.raises(BadBundle, match="something else where"):
        put(target, honest(bundle, wrong), wrong)
    assert contents(tmp_path) == before


def test_nothing_is_hidden_between_files(packed, target):
    bundle, raw = packed
    at = raw.index(b"graph") + len(b"graph")
    for place in (at, len(raw) - 1):
        wrong = raw[:place] + b"x" + raw[place + 1 :]
        with pytest.raises(BadBundle, match=r"nothing after|its end"):
            put(target, honest(bundle, wrong), wrong)
    assert contents(target) == {}


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32), cuts=st.integers(1, 6))
def test_damaged_anywhere_it_is_not_installed(packed, tmp_path, seed, cuts):
    bundle, raw = packed
    chance, wrong = random.Random(seed), bytearray(raw)
    for _ in range(cuts):
        at = chance.randrange(len(wrong))
        piece = bytes(chance.choice((0, 0x2E, 0x2F, 0xFF)) for _ in range(chance.randrange(1, 40)))
        wrong[at : at + len(piece)] = piece[: len(wrong) - at]
    if wrong == raw:
        return
    target = tmp_path / f"target-{seed}-{cuts}"
    with pytest.raises(BadBundle):
        put(target, honest(bundle, bytes(wrong)), bytes(wrong))
    assert contents(target) == {}


PARTS = st.sampled_from(["..", ".", "", "a", "b", "rank_0_0", "/", "torch_compile_cache"])
PATHS = st.lists(PARTS, min_size=1, max_size=6).map("/".join)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(paths=st.lists(st.tuples(st.sampled_from(["", f"{PLAIN}/", f"{AOT}/"]), PATHS), min_size=1))
def test_whatever_a_bundle_names_nothing_is_written_elsewhere(tmp_path_factory, paths):
    """With a manifest that nobody has read, and a bundle that is just what that says."""
    folder = tmp_path_factory.mktemp("outside")
    content, names = b"x" * 10, sorted(prefix + path for prefix, path in paths)
    members = tuple(Member(name, 10, hashlib.sha256(content).hexdigest()) for name in names)
    filled = content + ustar.padding(10)
    raw = b"".join(ustar.header(name, 10) + filled for name in names) + ustar.END
    bundle = Bundle(hashlib.sha256(raw).hexdigest(), len(raw), Manifest({}, members))
    with suppress(BadBundle):
        put(folder / "inside/root", bundle, raw)
        assert contents(folder) == {f"inside/root/{name}": content for name in names}
        return
    assert contents(folder) == {}
