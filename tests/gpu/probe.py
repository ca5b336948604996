"""What a loader does with a GPU, inside the sandbox of preloadd@.service. Prints JSON lines."""

from __future__ import annotations

import array
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

GIB = 1 << 30


def main() -> int:
    """Every step is tried and told; 0 if all worked."""
    steps: list[Callable[[], object]] = [
        who,
        torch_allocates,
        vmm_exports,
        pinned_copies,
        triton_compiles,
        nccl_reduces,
        graphs,
    ]
    failed = 0
    for step in steps:
        started = time.monotonic()
        try:
            told = {"step": step.__name__, "ok": True, "is": step()}
        except BaseException as error:  # noqa: BLE001 - each is told, the next is tried
            failed += 1
            told = {"step": step.__name__, "ok": False, "error": repr(error)[:500]}
            traceback.print_exc(file=sys.stderr)
        told["s"] = round(time.monotonic() - started, 2)
        print(json.dumps(told, default=str), flush=True)
    return 1 if failed else 0


class View:
    """A GiB of device memory, as torch takes it from others."""

    def __init__(self, address: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (GIB,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def who() -> object:
    """The sandbox as seen from inside."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    return {name: fields[name].strip() for name in ("Uid", "CapEff", "NoNewPrivs", "Seccomp")}


def torch_allocates() -> object:
    """A context, allocations, a matrix product."""
    import torch

    one = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    assert (one @ one).isfinite().all()
    return [torch.cuda.get_device_name(), torch.__version__]


def vmm_exports() -> object:
    """Memory made, exported as a descriptor, imported and mapped read-only, parked and counted."""
    import torch
    from cuda.bindings import driver as cu

    def check(result: tuple) -> object:
        assert result[0] == cu.CUresult.CUDA_SUCCESS, result
        return result[1] if len(result) == 2 else result[1:]

    kind = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    wanted = cu.CUmemAllocationProp()
    wanted.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.requestedHandleTypes = kind
    handle = check(cu.cuMemCreate(GIB, wanted, 0))
    fd = int(check(cu.cuMemExportToShareableHandle(handle, kind, 0)))
    again = check(cu.cuMemImportFromShareableHandle(fd, kind))
    sums = []
    for each, flags in (
        (handle, cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE),
        (again, cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ),
    ):
        address = check(cu.cuMemAddressReserve(GIB, 0, 0, 0))
        check(cu.cuMemMap(address, GIB, 0, each, 0))
        access = cu.CUmemAccessDesc()
        access.location = wanted.location
        access.flags = flags
        check(cu.cuMemSetAccess(address, GIB, [access], 1))

        seen = torch.as_tensor(View(int(address)), device="cuda")
        if not sums:
            seen.fill_(7)
        sums.append(int(seen[:: 1 << 20].long().sum()))
    assert sums[0] == sums[1] == 7 * 1024, sums
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.connect(os.environ["NOTIFY_SOCKET"].replace("@", "\0", 1))
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
    manager.sendmsg([b"FDSTORE=1\nFDNAME=chunk-0"], rights)
    return {"sums": sums, "parked": str(Path(f"/proc/self/fd/{fd}").readlink())}


def pinned_copies() -> object:
    """Pinned memory, and a copy out of it."""
    import torch

    host = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    device = host.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    started = time.monotonic()
    device.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    return {"GB/s": round(GIB / (time.monotonic() - started) / 1e9, 1)}


def triton_compiles() -> object:
    """A kernel compiled at run time: it writes code and runs it."""
    import tests_gpu_kernel
    import torch

    return tests_gpu_kernel.add_one(torch.zeros(1024, device="cuda"))


def nccl_reduces() -> object:
    """A communicator of one rank, which opens sockets and shared memory all the same."""
    import torch

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29555")
    torch.distributed.init_process_group("nccl", rank=0, world_size=1)
    one = torch.ones(8, device="cuda")
    torch.distributed.all_reduce(one)
    torch.distributed.destroy_process_group()
    return float(one.sum())


def graphs() -> object:
    """A captured graph."""
    import torch

    one = torch.ones(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        two = one * 2
    graph.replay()
    torch.cuda.synchronize()
    return float(two.sum())


if __name__ == "__main__":
    sys.exit(main())
