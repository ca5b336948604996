"""The library, and the layouts of what it is given."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import pytest

from preloadd.errors import NoSuchDevice
from preloadd.memory.hip import binding


def test_layouts_are_those_of_the_headers(tmp_path: Path) -> None:
    # Written down here as the public headers have them, for the compiler to lay out.
    (tmp_path / "layout.c").write_text("""
#include <stdio.h>
typedef enum { a } Enum;
typedef struct { Enum type; int id; } hipMemLocation;
typedef struct {
  Enum type; Enum requestedHandleType; hipMemLocation location; void *win32HandleMetaData;
  struct { unsigned char compressionType, gpuDirectRDMACapable; unsigned short usage; } allocFlags;
} hipMemAllocationProp;
typedef struct { hipMemLocation location; Enum flags; } hipMemAccessDesc;
int main(void) {
  hipMemAllocationProp p = {1, 1, {1, 5}}; hipMemAccessDesc d = {{1, 5}, 3};
  fwrite(&p, sizeof p, 1, stdout); fwrite(&d, sizeof d, 1, stdout);
}""")
    program = tmp_path / "layout"
    subprocess.run(["cc", "-o", program, tmp_path / "layout.c"], check=True)
    written = subprocess.run([program], capture_output=True, check=True).stdout
    assert binding.properties(5) + binding.access(5, binding.ACCESS_READ_WRITE) == written
    assert len(binding.access(0, 0)) == struct.calcsize("iii")


def test_a_library_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoSuchDevice, match=f"{tmp_path}/none.so.*install ROCm"):
        binding.load(tmp_path / "none.so")


def test_a_library_that_lacks_a_call_is_named(tmp_path: Path) -> None:
    (tmp_path / "old.c").write_text("int hipInit(unsigned flags) { return 0; }")
    library = tmp_path / "old.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "old.c"], check=True)
    with pytest.raises(NoSuchDevice, match=f"{library} is too old.*hipGetDeviceCount"):
        binding.load(library)
