"""Groups over nodes as their operators write them, and what each node has to launch.

What a node is told are vLLM's own flags, so that vLLM can be asked the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from preloadd.domain.ids import DeviceId
from preloadd.domain.launch import Launch
from preloadd.domain.placement import ExpertPlacement, Parallel

AT = "--master-addr 10.0.0.1 --weight-cache-master-port 29600"
DP_AT = "--data-parallel-address 10.0.0.2 --weight-cache-master-port 29600"


@dataclass(frozen=True)
class Row:
    """One node. Coordinates are data.pipeline.tensor of its first and its last rank. `drafting` are
    those of its ranks that have a draft beside them, where there is one."""

    name: str
    flags: tuple[str, ...]
    ranks: range
    first: str
    last: str
    node: str
    meeting: str
    moe: bool
    drafts: bool
    drafting: range

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Group:
    """A whole group: its flags, those of each node, and `ranks first last number/count` of each.

    Models have experts or are dense; `meeting` is without port where any free one will do. With
    several stages and a draft, `ranks` of those with a draft stand behind that, or `none`: there
    vLLM's own command starts drafts beside all ranks, though engines ask the last stage's alone.
    """

    name: str
    flags: str
    nodes: dict[str, str]
    meeting: str = "10.0.0.1:29600"
    moe: bool = False
    drafts: bool = False

    def rows(self) -> Iterator[Row]:
        for own, told in self.nodes.items():
            ranks, first, last, node, *drafting = told.split()
            yield Row(
                name=f"{self.name}, node {node}",
                flags=(*self.flags.split(), *own.split()),
                ranks=_range(ranks),
                first=first,
                last=last,
                node=node,
                meeting=self.meeting,
                moe=self.moe,
                drafts=self.drafts,
                drafting=_range(*drafting or [ranks]),
            )


def _range(told: str) -> range:
    if told == "none":
        return range(0)
    start, _, end = told.partition("-")
    return range(int(start), int(end or start) + 1)


GROUPS = (
    Group("one rank", "", {"": "0 0.0.0 0.0.0 0/1"}, "127.0.0.1"),
    Group("TP 2", "-tp 2", {"": "0-1 0.0.0 0.0.1 0/1"}, "127.0.0.1"),
    Group("TP 8", "-tp 8", {"": "0-7 0.0.0 0.0.7 0/1"}, "127.0.0.1"),
    Group("PP 4", "-pp 4", {"": "0-3 0.0.0 0.3.0 0/1"}, "127.0.0.1"),
    Group("TP 2 x PP 2", "-tp 2 -pp 2", {"": "0-3 0.0.0 0.1.1 0/1"}, "127.0.0.1"),
    Group("DP 2 dense", "-dp 2", {"": "0-1 0.0.0 1.0.0 0/1"}, "127.0.0.1"),
    Group("DP 2 x TP 2", "-dp 2 -tp 2", {"": "0-3 0.0.0 1.0.1 0/1"}, "127.0.0.1", moe=True),
    Group("DP 8 EP", "-dp 8 -ep", {"": "0-7 0.0.0 7.0.0 0/1"}, "127.0.0.1", moe=True),
    Group("TP 8 EP", "-tp 8 -ep", {"": "0-7 0.0.0 0.0.7 0/1"}, "127.0.0.1", moe=True),
    Group(
        "all four",
        "-dp 2 -pp 2 -tp 2 -ep",
        {"": "0-7 0.0.0 1.1.1 0/1"},
        "127.0.0.1",
        moe=True,
    ),
    Group("a port", f"-tp 2 {AT}", {"": "0-1 0.0.0 0.0.1 0/1"}),
    Group(
        "a target with a draft",
        "-tp 2 --weight-cache-master-port 29600 --weight-cache-draft-master-port 29700",
        {"": "0-1 0.0.0 0.0.1 0/1"},
        "127.0.0.1:29600/29700",
        moe=True,
        drafts=True,
    ),
    Group(
        "TP 16 on 2 x 8",
        f"-tp 16 --nnodes 2 {AT}",
        {"--node-rank 0": "0-7 0.0.0 0.0.7 0/2", "--node-rank 1": "8-15 0.0.8 0.0.15 1/2"},
    ),
    Group(
        "TP 4 on 4 x 1 by short names",
        f"-tp 4 -n 4 {AT}",
        {f"-r {n}": f"{n} 0.0.{n} 0.0.{n} {n}/4" for n in range(4)},
    ),
    Group(
        "PP 2 x TP 4 on 2 x 4",
        f"-tp 4 -pp 2 --nnodes 2 {AT}",
        {"--node-rank 0": "0-3 0.0.0 0.0.3 0/2", "--node-rank 1": "4-7 0.1.0 0.1.3 1/2"},
    ),
    Group(
        "PP 4 x TP 2 on 2 x 4",
        f"-tp 2 -pp 4 --nnodes 2 {AT}",
        {"--node-rank 0": "0-3 0.0.0 0.1.1 0/2", "--node-rank 1": "4-7 0.2.0 0.3.1 1/2"},
    ),
    Group(
        "PP 3 x TP 2 on 2 x 3, a stage over both",
        f"-tp 2 -pp 3 --nnodes 2 {AT}",
        {"--node-rank 0": "0-2 0.0.0 0.1.0 0/2", "--node-rank 1": "3-5 0.1.1 0.2.1 1/2"},
    ),
    Group(
        "TP 1 x DP 16 x EP on 4 x 4",
        f"-tp 1 -ep -dp 16 --data-parallel-size-local 4 {DP_AT}",
        {
            f"--data-parallel-start-rank {4 * n}": (
                f"{4 * n}-{4 * n + 3} {4 * n}.0.0 {4 * n + 3}.0.0 {n}/4"
            )
            for n in range(4)
        },
        "10.0.0.2:29600",
        moe=True,
    ),
    Group(
        "the same, dealt one by one",
        f"-ep --expert-placement-strategy round_robin -dp 16 -dpl 4 {DP_AT}",
        {f"-dpr {4 * n}": f"{4 * n}-{4 * n + 3} {4 * n}.0.0 {4 * n + 3}.0.0 {n}/4" for n in (0, 3)},
        "10.0.0.2:29600",
        moe=True,
    ),
    Group(
        "TP 8 x DP 2 on 4 x 4",
        f"-tp 8 -ep --nnodes 4 --master-addr 10.0.0.1 -dp 2 {DP_AT}",
        {
            "--node-rank 0": "0-3 0.0.0 0.0.3 0/4",
            "--node-rank 1": "4-7 0.0.4 0.0.7 1/4",
            "--node-rank 2": "8-11 1.0.0 1.0.3 2/4",
            "--node-rank 3": "12-15 1.0.4 1.0.7 3/4",
        },
        "10.0.0.2:29600",
        moe=True,
    ),
    Group(
        "TP 2 x DP 4 on 2 x 4",
        f"-tp 2 -dp 4 -dpl 2 {DP_AT}",
        {"-dpr 0": "0-3 0.0.0 1.0.1 0/2", "-dpr 2": "4-7 2.0.0 3.0.1 1/2"},
        "10.0.0.2:29600",
        moe=True,
    ),
    Group(
        "TP 2 x DP 4 on 2 x 4 by nodes",
        f"-tp 2 -dp 4 --nnodes 2 {AT}",
        {"--node-rank 0": "0-3 0.0.0 1.0.1 0/2", "--node-rank 1": "4-7 2.0.0 3.0.1 1/2"},
        moe=True,
    ),
    Group(
        "said twice",
        f"-tp 2 -dp 4 --nnodes 2 -dpl 2 {AT} {DP_AT}",
        {"-r 0 -dpr 0": "0-3 0.0.0 1.0.1 0/2", "-r 1 -dpr 2": "4-7 2.0.0 3.0.1 1/2"},
        "10.0.0.2:29600",
        moe=True,
    ),
    Group(
        "one replica on both, said twice",
        f"-tp 4 --nnodes 2 -dpl 1 {AT}",
        {"-r 0": "0-1 0.0.0 0.0.1 0/2", "-r 1": "2-3 0.0.2 0.0.3 1/2"},
    ),
    Group(
        "a port that engines have where a replica spans nodes",
        "-dp 2 -dpl 1 --data-parallel-address 10.0.0.2 --weight-cache-master-port 29501",
        {"-dpr 0": "0 0.0.0 0.0.0 0/2", "-dpr 1": "1 1.0.0 1.0.0 1/2"},
        "10.0.0.2:29501",
        moe=True,
    ),
    Group(
        "a port that engines have where replicas are on several nodes",
        "-tp 2 --nnodes 2 --master-addr 10.0.0.1 --weight-cache-master-port 29550",
        {"-r 0": "0 0.0.0 0.0.0 0/2", "-r 1": "1 0.0.1 0.0.1 1/2"},
        "10.0.0.1:29550",
    ),
    Group(
        "PP 2 x TP 2 x DP 4 on 4 x 4",
        f"-pp 2 -tp 2 -ep -dp 4 -dpl 1 {DP_AT}",
        {f"-dpr {n}": f"{4 * n}-{4 * n + 3} {n}.0.0 {n}.1.1 {n}/4" for n in range(4)},
        "10.0.0.2:29600",
        moe=True,
    ),
    Group(
        "PP 2 x TP 2 x DP 2 on 4 x 2, a stage each",
        f"-pp 2 -tp 2 -ep -dp 2 --nnodes 4 {AT}",
        {
            "-r 0": "0-1 0.0.0 0.0.1 0/4",
            "-r 1": "2-3 0.1.0 0.1.1 1/4",
            "-r 2": "4-5 1.0.0 1.0.1 2/4",
            "-r 3": "6-7 1.1.0 1.1.1 3/4",
        },
        moe=True,
    ),
    Group(
        "DP 2 dense on 2 x 1",
        f"-dp 2 -dpl 1 {DP_AT}",
        {"-dpr 0": "0 0.0.0 0.0.0 0/2", "-dpr 1": "1 1.0.0 1.0.0 1/2"},
        "10.0.0.2:29600",
    ),
    Group(
        "DP 4 x TP 2 dense on 4 x 2 by nodes",
        f"-dp 4 -tp 2 --nnodes 4 {AT}",
        {f"-r {n}": f"{2 * n}-{2 * n + 1} {n}.0.0 {n}.0.1 {n}/4" for n in range(4)},
    ),
    Group(
        "replicas meet at the master's address if at no other",
        "-dp 2 -dpl 1 --master-addr node-1 --weight-cache-master-port 29600",
        {"-dpr 0": "0 0.0.0 0.0.0 0/2", "-dpr 1": "1 1.0.0 1.0.0 1/2"},
        "node-1:29600",
        moe=True,
    ),
    Group(
        "one replica meets at the master's address alone",
        f"-tp 2 --nnodes 2 --data-parallel-address 10.0.0.9 {AT}",
        {"-r 0": "0 0.0.0 0.0.0 0/2", "-r 1": "1 0.0.1 0.0.1 1/2"},
    ),
    Group(
        "TP 16 on 2 x 8 with a draft",
        f"-tp 16 --nnodes 2 {AT}",
        {"-r 0": "0-7 0.0.0 0.0.7 0/2", "-r 1": "8-15 0.0.8 0.0.15 1/2"},
        "10.0.0.1:29600/29601",
        moe=True,
        drafts=True,
    ),
    Group(
        "DP 16 x EP on 4 x 4 with a draft",
        f"-ep -dp 16 -dpl 4 {DP_AT} --weight-cache-draft-master-port 40000",
        {f"-dpr {4 * n}": f"{4 * n}-{4 * n + 3} {4 * n}.0.0 {4 * n + 3}.0.0 {n}/4" for n in (0, 2)},
        "10.0.0.2:29600/40000",
        moe=True,
        drafts=True,
    ),
    Group(
        "TP 8 x DP 2 on 4 x 4 with a draft",
        f"-tp 8 -ep --nnodes 4 --master-addr 10.0.0.1 -dp 2 {DP_AT}",
        {"-r 0": "0-3 0.0.0 0.0.3 0/4", "-r 3": "12-15 1.0.4 1.0.7 3/4"},
        "10.0.0.2:29600/29601",
        moe=True,
        drafts=True,
    ),
    Group(
        "PP 2 x TP 2 with a draft",
        "-pp 2 -tp 2",
        {"": "0-3 0.0.0 0.1.1 0/1 2-3"},
        "127.0.0.1",
        moe=True,
        drafts=True,
    ),
    Group(
        "PP 2 x TP 2 on 2 x 2, a stage each, with a draft",
        f"-pp 2 -tp 2 --nnodes 2 {AT}",
        {"-r 0": "0-1 0.0.0 0.0.1 0/2 none", "-r 1": "2-3 0.1.0 0.1.1 1/2 2-3"},
        "10.0.0.1:29600/29601",
        moe=True,
        drafts=True,
    ),
    Group(
        "PP 2 x DP 2 on 2 x 2, a replica each, with a draft",
        f"-pp 2 -dp 2 -dpl 1 {DP_AT}",
        {"-dpr 0": "0-1 0.0.0 0.1.0 0/2 1", "-dpr 1": "2-3 1.0.0 1.1.0 1/2 3"},
        "10.0.0.2:29600/29601",
        moe=True,
        drafts=True,
    ),
    Group(
        "DP 3 on nodes of two sizes",
        f"-dp 3 -tp 2 {DP_AT}",
        {"-dpl 2 -dpr 0": "0-3 0.0.0 1.0.1 0/2", "-dpl 1 -dpr 2": "4-5 2.0.0 2.0.1 2/3"},
        "10.0.0.2:29600",
        moe=True,
    ),
    Group(
        "IPv6",
        "-tp 2 --nnodes 2 --master-addr fd00::1 --weight-cache-master-port 29600",
        {"-r 0": "0 0.0.0 0.0.0 0/2", "-r 1": "1 0.0.1 0.0.1 1/2"},
        "fd00::1:29600",
    ),
)

ROWS = tuple(row for group in GROUPS for row in group.rows())


def launch_of(flags: Iterator[str] | tuple[str, ...], *, drafts: bool = False) -> Launch:
    """What a node is told that has a device for every rank it could have."""
    said = vars(_parser().parse_args([*flags]))
    parallel = Parallel(
        tensor=said.pop("tensor_parallel_size"),
        pipeline=said.pop("pipeline_parallel_size"),
        data=said.pop("data_parallel_size"),
        expert=said.pop("enable_expert_parallel"),
        expert_placement=ExpertPlacement(said.pop("expert_placement_strategy")),
    )
    health = said.pop("weight_cache_health_port")
    return Launch(
        parallel=parallel,
        devices=tuple(DeviceId(f"CPU-{number}") for number in range(parallel.world)),
        drafts=drafts,
        others={"weight-cache-health-port": health},
        **said,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for short, name in (("-tp", "tensor"), ("-pp", "pipeline"), ("-dp", "data")):
        parser.add_argument(short, f"--{name}-parallel-size", type=int, default=1)
    parser.add_argument("-ep", "--enable-expert-parallel", action="store_true")
    parser.add_argument("--expert-placement-strategy", default="linear")
    parser.add_argument("-n", "--nnodes", type=int)
    parser.add_argument("-r", "--node-rank", type=int)
    parser.add_argument("-dpl", "--data-parallel-size-local", type=int)
    parser.add_argument("-dpr", "--data-parallel-start-rank", type=int)
    parser.add_argument("--data-parallel-address", default="")
    parser.add_argument("--master-addr", default="")
    parser.add_argument("--master-port", type=int)
    for port in ("master", "draft-master"):
        parser.add_argument(f"--weight-cache-{port}-port", type=int)
    parser.add_argument("--weight-cache-health-port", type=int, default=0)
    return parser
