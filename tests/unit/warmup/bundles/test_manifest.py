import json

import pytest

from preloadd.warmup.bundles import manifest
from preloadd.warmup.bundles.manifest import BadBundle, Manifest, Member, from_json, render

AOT = "torch_compile_cache/torch_aot_compile/" + "5a" * 32
SHA = "cd" * 32


def of(*paths, nbytes=1):
    return Manifest({"vllm": "1"}, tuple(Member(path, nbytes, SHA) for path in paths))


def body(*paths, **changes):
    return json.loads(render(of(*paths))) | changes


def test_what_is_rendered_is_read():
    one = of(f"{AOT}/inductor_cache/a.py", f"{AOT}/rank_0_0/model")
    assert from_json(json.loads(render(one))) == one
    assert one.folders == (AOT,)
    assert one.nbytes == 2


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        f"/{AOT}/a",
        "../torch_compile_cache/0123456789/a",
        f"{AOT}/../a",
        f"{AOT}/a/../../b",
        f"{AOT}/./a",
        f"{AOT}//a",
        f"{AOT}/",
        AOT,
        f"{AOT}x/a",
        "torch_compile_cache/a",
        "torch_compile_cache/0123456789x/a",
        "torch_compile_cache/torch_aot_compile/a",
        "flashinfer_autotune_cache/x",
        "torch_compile_cache/0123456789",
        f"{AOT}/a\nb",
        f"{AOT}/a\0b",
        f"{AOT}/a b",
        f"{AOT}/a\\b",
        f"{AOT}/é",
        f"{AOT}/{'a' * 256}",
        AOT + "/a" * 20,
        AOT + ("/" + "a" * 250) * 4,
        f"{AOT}/__pycache__/x.pyc",
        f"{AOT}/locks/x",
        f"{AOT}/x.lock",
    ],
)
def test_no_path_leads_elsewhere(path):
    raw = body(f"{AOT}/a")
    raw["files"][0]["path"] = path
    with pytest.raises(BadBundle):
        from_json(raw)


@pytest.mark.parametrize(
    ("paths", "match"),
    [
        ((f"{AOT}/a", f"{AOT}/a"), "twice"),
        ((f"{AOT}/b", f"{AOT}/a"), "not in its place"),
        ((f"{AOT}/a", f"{AOT}/a.b", f"{AOT}/a/b"), "below a file"),
        ((), "0 files"),
    ],
)
def test_no_file_is_in_the_way_of_another(paths, match):
    with pytest.raises(BadBundle, match=match):
        from_json(body(*paths))


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"more": 1},
        {"files": {}},
        {"files": ["x"]},
        {"files": [{"path": f"{AOT}/a", "size": 1}]},
        {"files": [{"path": 5, "size": 1, "sha256": SHA}]},
        {"files": [{"path": f"{AOT}/a", "size": True, "sha256": SHA}]},
        {"files": [{"path": f"{AOT}/a", "size": -1, "sha256": SHA}]},
        {"files": [{"path": f"{AOT}/a", "size": 1 << 40, "sha256": SHA}]},
        {"files": [{"path": f"{AOT}/a", "size": 1, "sha256": "CD" * 32}]},
        {"files": [{"path": f"{AOT}/a", "size": 1, "sha256": SHA, "mode": 0o4755}]},
        {"count": 2},
        {"total": 2},
        {"identity": []},
        {"identity": {"a": 1}},
        {"identity": {"A b": "1"}},
        {"identity": {"a": "x" * 8193}},
        {"identity": {f"a{'b' * n}": "" for n in range(63)} | {"c_": "", "d_": ""}},
    ],
)
def test_no_other_form_is_read(changes):
    with pytest.raises(BadBundle):
        from_json(body(f"{AOT}/a", **changes))


@pytest.mark.parametrize("other", [None, [], "x", 5])
def test_what_is_no_object_is_none(other):
    with pytest.raises(BadBundle, match="format 1"):
        from_json(other)


def test_there_are_caps():
    some = {"path": f"{AOT}/a", "size": manifest.MAX_FILE, "sha256": SHA}
    two = [some, some | {"path": f"{AOT}/b"}]
    with pytest.raises(BadBundle, match=f"{manifest.MAX_BUNDLE:,} are the most"):
        from_json(body(f"{AOT}/a", files=two, count=2, total=2 * manifest.MAX_FILE))
    with pytest.raises(BadBundle, match="16,385 files"):
        from_json(body(f"{AOT}/a", files=[None] * 16_385))


def test_the_largest_file_fits():
    one = of("torch_compile_cache/0123456789/" + "a" * 255, nbytes=manifest.MAX_FILE)
    assert one.bundle_nbytes <= manifest.MAX_BUNDLE
