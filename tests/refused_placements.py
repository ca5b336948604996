"""What no node of a group can be told, and what it hears of it."""

from __future__ import annotations

from dataclasses import dataclass

from tests.placements import AT, DP_AT

HERE = "of 2 ranks only 0 to 0 are here"
FIRST = "the first node's address, as all nodes reach it"
ONE_PORT = "one port, the same on every node"


@dataclass(frozen=True)
class Refusal:
    """The flags of one node, and all that is wrong with them. `vllm` refuses them as well, or lets
    nodes do what they cannot do together."""

    flags: str
    text: str
    vllm: bool = False
    drafts: bool = False

    def __str__(self) -> str:
        return self.flags


REFUSALS = (
    Refusal(
        f"-tp 16 --nnodes 3 --node-rank 0 {AT}",
        "--nnodes: is 3, but data 1 x pipeline 1 x tensor 16 = 16 ranks, and 16 / 3 "
        "leaves 1: give a number that divides 16",
        vllm=True,
    ),
    Refusal(
        f"-tp 4 --nnodes 2 --node-rank 2 {AT}",
        "--node-rank: is 2, but nnodes is 2: give 0 to 1",
        vllm=True,
    ),
    Refusal(f"-tp 4 --nnodes 2 {AT}", "--node-rank: must be given where nnodes is 2: give 0 to 1"),
    Refusal(
        f"-dp 3 -tp 2 --nnodes 2 --node-rank 1 {AT}",
        "--nnodes: is 2, so one has 6 / 2 = 3 ranks, but a replica has pipeline 1 x "
        "tensor 2 = 2 ranks: let nodes hold whole replicas, or replicas whole nodes",
        vllm=True,
    ),
    Refusal(
        f"-dp 2 -tp 3 --nnodes 3 --node-rank 1 {AT}",
        "--nnodes: is 3, so one has 6 / 3 = 2 ranks, but a replica has pipeline 1 x "
        "tensor 3 = 3 ranks: let nodes hold whole replicas, or replicas whole nodes",
        vllm=True,
    ),
    Refusal(
        f"-dp 4 -tp 2 --nnodes 2 --node-rank 1 -dpr 1 -dpl 4 {AT}",
        "--data-parallel-start-rank: is 1, but node 1 of 2 has ranks 4 to 7, 2 to a "
        "replica, which makes it 2: leave it out\n"
        "--data-parallel-size-local: is 4, but node 1 of 2 has ranks 4 to 7, 2 to a "
        "replica, which makes it 2: leave it out",
    ),
    Refusal(
        f"-dp 16 -dpl 8 -dpr 12 {DP_AT}",
        "--data-parallel-size-local: reaches past the last replica, since "
        "data-parallel-start-rank 12 + 8 = 20, but data-parallel-size is 16: give at most 4",
        vllm=True,
    ),
    Refusal(
        f"-dp 4 -dpl 6 -dpr 0 {DP_AT}",
        "--data-parallel-size-local: reaches past the last replica, since "
        "data-parallel-start-rank 0 + 6 = 6, but data-parallel-size is 4: give at most 4",
        vllm=True,
    ),
    Refusal(
        f"-dp 4 -dpr 2 {DP_AT}",
        "--data-parallel-size-local: reaches past the last replica, since "
        "data-parallel-start-rank 2 + 4 = 6, but data-parallel-size is 4: give at most 2",
    ),
    Refusal(
        f"-dp 4 -dpl 1 -dpr 4 {DP_AT}",
        "--data-parallel-start-rank: is 4, but data-parallel-size is 4: give 0 to 3",
        vllm=True,
    ),
    Refusal(
        f"-dp 4 -dpl 1 -dpr -1 {DP_AT}",
        "--data-parallel-start-rank: is -1, but data-parallel-size is 4: give 0 to 3",
        vllm=True,
    ),
    Refusal(
        "-dp 2 -dpl 0",
        "--data-parallel-size-local: is 0: give at least 1, or launch nothing here",
        vllm=True,
    ),
    Refusal(
        f"-dp 4 -dpl 2 {DP_AT}",
        "--data-parallel-start-rank: must be given where a node has 2 of 4 replicas: "
        "give the number of its first",
    ),
    Refusal(
        f"-tp 2 --node-rank 1 {AT}",
        "--node-rank: is 1, but there is one node: leave it out, or give nnodes",
    ),
    Refusal("-tp 2 --nnodes 0", "--nnodes: is 0: give at least 1", vllm=True),
    Refusal(
        "-tp 2 --nnodes 2 --node-rank 0",
        f"--master-addr: must be given, since {HERE}: {FIRST}\n"
        f"--weight-cache-master-port: must be given, since {HERE}: {ONE_PORT}",
        vllm=True,
    ),
    Refusal(
        "-dp 2 -dpl 1 -dpr 0",
        f"--data-parallel-address: must be given, since {HERE}: {FIRST}\n"
        f"--weight-cache-master-port: must be given, since {HERE}: {ONE_PORT}",
        vllm=True,
    ),
    Refusal(
        "-dp 2 -dpl 1 -dpr 0 --data-parallel-address localhost --weight-cache-master-port 29600",
        f"--data-parallel-address: 'localhost' is another host on each host, but {HERE}: "
        f"give {FIRST}",
        vllm=True,
    ),
    Refusal(
        "-dp 2 --nnodes 2 -r 0 --master-addr 127.0.0.1 --weight-cache-master-port 29600",
        f"--master-addr: '127.0.0.1' is another host on each host, but {HERE}: give {FIRST}",
        vllm=True,
    ),
    Refusal(
        "-tp 2 --nnodes 2 -r 0 --master-addr ::1 --weight-cache-master-port 29600",
        f"--master-addr: '::1' is another host on each host, but {HERE}: give {FIRST}",
    ),
    Refusal(
        "-tp 2 --weight-cache-master-port 65536",
        "--weight-cache-master-port: 65536 is past the last port, 65535: give a lower one",
    ),
    Refusal(
        "-tp 2 --weight-cache-master-port 65535",
        "--weight-cache-draft-master-port: weight-cache-master-port 65535 + 1 = 65536 is "
        "past the last port, 65535: give a lower one",
        drafts=True,
    ),
    Refusal(
        "-tp 2 --weight-cache-master-port -1", "--weight-cache-master-port: is -1: give 1 to 65535"
    ),
    Refusal(
        f"-tp 2 --nnodes 2 -r 0 {AT} --weight-cache-draft-master-port 29600",
        "--weight-cache-draft-master-port: 29600 is in use: 29600 is the target's: give "
        "another one",
        vllm=True,
        drafts=True,
    ),
    Refusal(
        f"-tp 2 --nnodes 2 -r 0 {AT} --master-port 29600",
        "--weight-cache-master-port: 29600 is in use: 29600 is the engine's master-port: "
        "give another one",
    ),
    Refusal(
        "-tp 2 --nnodes 2 -r 0 --master-addr 10.0.0.1 --weight-cache-master-port 29501",
        "--weight-cache-master-port: 29501 is in use: 29501 is the engine's master-port: "
        "give another one",
    ),
    Refusal(
        "-tp 2 --nnodes 2 -r 0 --master-addr 10.0.0.1 --weight-cache-master-port 29500",
        "--weight-cache-draft-master-port: weight-cache-master-port 29500 + 1 = 29501 is "
        "in use: 29501 is the engine's master-port: give another one",
        drafts=True,
    ),
    Refusal(
        "-dp 2 -dpl 1 -dpr 0 --data-parallel-address 10.0.0.1 --weight-cache-master-port 29550",
        "--weight-cache-master-port: 29550 is in use: 29550 is the engine's "
        "data-parallel-rpc-port: give another one",
    ),
    Refusal(
        "-tp 2 --weight-cache-master-port 9100 --weight-cache-health-port 9100",
        "--weight-cache-master-port: 9100 is in use: 9100 is weight-cache-health-port: "
        "give another one",
    ),
    Refusal(
        "-tp 16 --nnodes 3 --node-rank 5 --master-addr 0.0.0.0",
        "--node-rank: is 5, but nnodes is 3: give 0 to 2\n"
        "--nnodes: is 3, but data 1 x pipeline 1 x tensor 16 = 16 ranks, and 16 / 3 "
        "leaves 1: give a number that divides 16\n"
        "--master-addr: '0.0.0.0' is another host on each host, but ranks are on several "
        f"nodes: give {FIRST}\n"
        "--weight-cache-master-port: must be given, since ranks are on several nodes: "
        f"{ONE_PORT}",
        vllm=True,
    ),
)
