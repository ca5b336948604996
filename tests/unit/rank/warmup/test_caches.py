from preloadd.rank.warmup.caches import CacheContents, Caches

HASH, OTHER = "ab" * 32, "cd" * 32


def test_what_engines_of_an_environment_leave_is_told_by_comparing(tmp_path):
    caches = Caches.of({"VLLM_CACHE_ROOT": str(tmp_path), "HOME": "/nowhere"})
    assert caches.listing() == CacheContents()
    tables = tmp_path / "flashinfer_autotune_cache/0.7.2/90a"
    compiled = tmp_path / "torch_compile_cache"
    (tables / HASH).mkdir(parents=True)
    (tables / HASH / "autotune_configs_dp0_rank0.json").touch()
    (compiled / "torch_aot_compile/old").mkdir(parents=True)
    before = caches.listing()
    (tables / HASH / "autotune_configs_dp0_rank1.json").touch()
    (tables / HASH / ".autotuner_1.tmp").touch()
    (tables / OTHER).mkdir()
    (compiled / "torch_aot_compile/new").mkdir()
    (compiled / "0123456789").mkdir()
    (compiled / "a file").touch()
    assert caches.listing().since(before) == CacheContents(
        frozenset({f"{HASH}/autotune_configs_dp0_rank1.json"}),
        frozenset({"torch_aot_compile/new", "0123456789"}),
    )


def test_tables_are_looked_for_where_the_environment_has_them(tmp_path):
    environ = {
        "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": str(tmp_path / "tables"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    (tmp_path / "tables" / HASH).mkdir(parents=True)
    (tmp_path / "tables" / HASH / "autotune_configs_dp0_rank0.json").touch()
    (tmp_path / "cache/vllm/torch_compile_cache/a").mkdir(parents=True)
    assert Caches.of(environ).listing() == CacheContents(
        frozenset({f"{HASH}/autotune_configs_dp0_rank0.json"}), frozenset({"a"})
    )
