import pytest

from preloadd.warmup.stores.api import require_key


@pytest.mark.parametrize(
    "key",
    [
        f"vllm-warmup-cache/flashinfer_autotune/{'0f' * 32}/autotune_configs_dp0_rank0.json",
        f"vllm-warmup-cache/compile_cache/{'0f' * 32}/bundle.tar",
        "a",
        "/".join("abcdefgh"),
    ],
)
def test_keys(key):
    require_key(key)


@pytest.mark.parametrize(
    "key",
    [
        *("", "/a", "a/", "a//b", "a/../b", ".a", "a/.b", "a b", "a\nb", "a\n", "ä", "a\0"),
        *("a/b\\c", "x" * 129, "/".join("abcdefghi")),
    ],
)
def test_what_is_no_key(key):
    with pytest.raises(ValueError, match="is no key"):
        require_key(key)
