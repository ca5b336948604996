"""The command line of `preloadd run`: what may be written, not what it means.

Values arrive as text and are judged by `config`, so that all faults are told in one go.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import anyio
import typer
import typer.core
import typer.main

from preloadd.config.run import RunOptions, parse_run
from preloadd.domain.launch import flag
from preloadd.errors import PreloadError
from preloadd.launcher.arguments import divide
from preloadd.launcher.checks import allow_many_files
from preloadd.launcher.progress import complain, make_display
from preloadd.launcher.start import Start
from preloadd.linux.fds import exhausted, is_exhausted

MODEL = "Model"
PARALLEL = "Parallelism"
NODES = "Parallelism over several nodes: the same on each but for the numbers that say which it is"
ENGINES = "Engines: where they find the weights, and who may have them"
HEALTH = "Health endpoint"
PROCESSES = "Processes"

_NO_VALUE = " "
"""Shown where options have what they take; without it, switches are told to take a bool."""

_HELP = ("-h", "--help")

app = typer.Typer(add_completion=False)


def main(words: Sequence[str]) -> None:
    """Run the command line and exit with the group's code."""
    command = typer.main.get_command(app)
    asked = command.get_help_option(typer.Context(command, **command.context_settings))
    if asked is not None:
        asked.metavar = _NO_VALUE
    options = {
        name: not (isinstance(option, typer.core.TyperOption) and option.is_flag)
        for option in command.params
        for name in option.opts
    }
    line = divide(words, {**options, **dict.fromkeys(_HELP, False)})
    command(line.own, prog_name="preloadd run", obj=line.engine)


def _option(field: str, panel: str, metavar: str | None, text: str, *, short: str = "") -> object:
    """The option for `field` of RunOptions."""
    names = [flag(field), short] if short else [flag(field)]
    return typer.Option(*names, help=text, rich_help_panel=panel, metavar=metavar or _NO_VALUE)


# None means that a flag was not given: its default is that of RunOptions.
Text = str | None
Texts = list[str] | None

Model = Annotated[
    Texts,
    _option(
        "model",
        MODEL,
        "PATH|ID",
        "Checkpoint folder or Hugging Face id. Required; may stand first without --model.",
    ),
]
Revision = Annotated[
    Text, _option("revision", MODEL, "REV", "Branch, tag or commit of a Hugging Face id.")
]
Builder = Annotated[
    Text,
    _option(
        "builder",
        MODEL,
        "native|vllm",
        "What fills the memory: the weights as they are stored, or what vLLM makes of them, for "
        "its engines. Default: native.",
    ),
]
Layout = Annotated[
    Text,
    _option(
        "layout",
        MODEL,
        "auto|processed|plain|raw",
        "In which form vLLM's weights are kept: processed in GPU memory, plain in host memory, or "
        "there raw as well, which every engine processes for itself. Default: auto.",
    ),
]
Memory = Annotated[
    Text,
    _option(
        "memory",
        MODEL,
        "auto|host|cuda|hip",
        "Where the weights live: in the memory of GPUs, NVIDIA's (cuda) or AMD's (hip: untested on "
        "hardware), or in host memory; auto is cuda if such a GPU answers, else host, which for "
        "vLLM has to be asked for. Default: auto.",
    ),
]
Gpus = Annotated[
    Text,
    _option(
        "gpus",
        MODEL,
        "all|UUID[,UUID...]",
        "GPU of each rank, by UUID or the beginning of one; all is every GPU that is seen, which "
        "must be one for each rank. Default: the first ones that CUDA shows, as "
        "CUDA_VISIBLE_DEVICES has it.",
    ),
]
Reader = Annotated[
    Text,
    _option(
        "reader",
        MODEL,
        "pread|instanttensor",
        "What reads the checkpoint: preloadd itself, or the package instanttensor, for disks that "
        "are faster than that (cuda memory only). vLLM reads by itself. Default: pread.",
    ),
]
ChunkBytes = Annotated[
    Text,
    _option(
        "chunk_bytes",
        MODEL,
        "SIZE",
        "Largest single allocation. Default: 1GiB in host memory, 4GiB on a GPU.",
    ),
]
Digest = Annotated[
    Text,
    _option(
        "digest",
        MODEL,
        "sampled|full",
        "How one checkpoint's content is told from another's: by a sample of every tensor's bytes "
        "(blind between samples), or by all of them. Default: sampled.",
    ),
]
TensorParallelSize = Annotated[
    Texts,
    _option(
        "tensor_parallel_size", PARALLEL, "N", "Slices of every layer. Default: 1.", short="-tp"
    ),
]
PipelineParallelSize = Annotated[
    Texts,
    _option("pipeline_parallel_size", PARALLEL, "N", "Runs of layers. Default: 1.", short="-pp"),
]
DataParallelSize = Annotated[
    Texts,
    _option(
        "data_parallel_size",
        PARALLEL,
        "N",
        "Replicas, each of the tensor size times the pipeline size in ranks. Default: 1.",
        short="-dp",
    ),
]
EnableExpertParallel = Annotated[
    bool,
    _option(
        "enable_expert_parallel",
        PARALLEL,
        None,
        "Deal whole experts to ranks, not slices.",
        short="-ep",
    ),
]
ExpertPlacementStrategy = Annotated[
    Texts,
    _option(
        "expert_placement_strategy",
        PARALLEL,
        "HOW",
        "linear (in blocks) or round_robin (dealt one after the other). Default: linear.",
    ),
]
Nnodes = Annotated[
    Texts,
    _option(
        "nnodes",
        NODES,
        "N",
        "Nodes that share the group's ranks, in blocks of one size. Default: 1.",
        short="-n",
    ),
]
NodeRank = Annotated[
    Texts, _option("node_rank", NODES, "N", "Which of them this one is, from 0.", short="-r")
]
DataParallelSizeLocal = Annotated[
    Texts,
    _option(
        "data_parallel_size_local",
        NODES,
        "N",
        "Instead of --nnodes: so many replicas are on this node. Default: all.",
        short="-dpl",
    ),
]
DataParallelStartRank = Annotated[
    Texts,
    _option(
        "data_parallel_start_rank",
        NODES,
        "N",
        "The number of the first of them, from 0.",
        short="-dpr",
    ),
]
MasterAddr = Annotated[
    Texts,
    _option(
        "master_addr",
        NODES,
        "ADDRESS",
        "The first node, as all nodes reach it: where ranks of several nodes meet.",
    ),
]
DataParallelAddress = Annotated[
    Texts,
    _option(
        "data_parallel_address",
        NODES,
        "ADDRESS",
        "The same with several replicas. Default: --master-addr.",
        short="-dpa",
    ),
]
WeightCacheMasterPort = Annotated[
    Texts,
    _option(
        "weight_cache_master_port",
        NODES,
        "PORT",
        "The port there, the same on every node. Required where ranks are on several.",
    ),
]
WeightCacheDraftMasterPort = Annotated[
    Texts,
    _option(
        "weight_cache_draft_master_port",
        NODES,
        "PORT",
        "The same for ranks of a draft. Default: --weight-cache-master-port + 1.",
    ),
]
MasterPort = Annotated[
    Texts,
    _option(
        "master_port",
        NODES,
        "PORT",
        "The engine's, as it is given to that: no port of ours may be the same.",
    ),
]
DataParallelRpcPort = Annotated[
    Texts, _option("data_parallel_rpc_port", NODES, "PORT", "Likewise.", short="-dpp")
]
RendezvousTimeout = Annotated[
    Text,
    _option(
        "rendezvous_timeout",
        NODES,
        "SECONDS",
        "How long all ranks may take to meet there before they load. Default: 600.",
    ),
]
PeerSilenceTimeout = Annotated[
    Text,
    _option(
        "peer_silence_timeout",
        NODES,
        "SECONDS",
        "How long a rank may not be heard there before it counts as lost. Default: 15.",
    ),
]
SocketDir = Annotated[
    Text,
    _option(
        "weight_cache_socket_dir",
        ENGINES,
        "DIR",
        "Folder of the ranks' sockets, made if it is not there. "
        "Default: the first of your own that engines search.",
    ),
]
AccessGroup = Annotated[
    Texts, _option("access_group", ENGINES, "GROUP", "Group that may attach. May be repeated.")
]
AccessUser = Annotated[
    Texts, _option("access_user", ENGINES, "USER", "User who may attach. May be repeated.")
]
HealthHost = Annotated[
    Text, _option("weight_cache_health_host", HEALTH, "HOST", "Default: 127.0.0.1.")
]
HealthPort = Annotated[
    Text,
    _option(
        "weight_cache_health_port",
        HEALTH,
        "PORT",
        "Serve /healthz, /readyz and /livez here; 0 picks a free port and tells it. "
        "Default: no endpoint.",
    ),
]
NoDraft = Annotated[
    bool,
    _option(
        "no_draft",
        MODEL,
        None,
        "Keep only the target of --speculative-config in memory. Default: a draft by mtp, eagle or "
        "eagle3 as well, in ranks of its own; engines load all others from disk.",
    ),
]
RestartRanks = Annotated[
    bool,
    _option(
        "restart_ranks",
        PROCESSES,
        None,
        "Start a failed rank again, with the weights it had, instead of ending the group.",
    ),
]
Python = Annotated[
    Text,
    _option(
        "python",
        PROCESSES,
        "PATH",
        "Interpreter of the loaders, with the engine's libraries. Default: this one.",
    ),
]
LogLevel = Annotated[
    Text, _option("log_level", PROCESSES, "LEVEL", "debug, info, warning or error. Default: info.")
]


@app.command(
    options_metavar="[MODEL] [OPTIONS] [VLLM'S OPTIONS]",
    context_settings={"help_option_names": list(_HELP)},
    # Not a docstring, whose line breaks would be kept, whatever the width of the terminal.
    help="Load a model once, keep its weights in memory and hand them to engines.\n\n"
    "Runs until it is stopped (Ctrl-C, SIGTERM) or a rank fails; the weights are freed then.\n\n"
    "With --builder vllm, options of `vllm serve` for its engine may stand anywhere on the line, "
    "or after a --. Give those that the engines get: sizes, dtype, quantization and the like "
    "decide what weights become.",
)
def run(
    context: typer.Context,
    *,
    model: Model = None,
    revision: Revision = None,
    builder: Builder = None,
    layout: Layout = None,
    no_draft: NoDraft = False,
    memory: Memory = None,
    gpus: Gpus = None,
    reader: Reader = None,
    chunk_bytes: ChunkBytes = None,
    digest: Digest = None,
    tensor_parallel_size: TensorParallelSize = None,
    pipeline_parallel_size: PipelineParallelSize = None,
    data_parallel_size: DataParallelSize = None,
    enable_expert_parallel: EnableExpertParallel = False,
    expert_placement_strategy: ExpertPlacementStrategy = None,
    nnodes: Nnodes = None,
    node_rank: NodeRank = None,
    data_parallel_size_local: DataParallelSizeLocal = None,
    data_parallel_start_rank: DataParallelStartRank = None,
    master_addr: MasterAddr = None,
    data_parallel_address: DataParallelAddress = None,
    weight_cache_master_port: WeightCacheMasterPort = None,
    weight_cache_draft_master_port: WeightCacheDraftMasterPort = None,
    master_port: MasterPort = None,
    data_parallel_rpc_port: DataParallelRpcPort = None,
    rendezvous_timeout: RendezvousTimeout = None,
    peer_silence_timeout: PeerSilenceTimeout = None,
    weight_cache_socket_dir: SocketDir = None,
    access_group: AccessGroup = None,
    access_user: AccessUser = None,
    weight_cache_health_host: HealthHost = None,
    weight_cache_health_port: HealthPort = None,
    restart_ranks: RestartRanks = False,
    python: Python = None,
    log_level: LogLevel = None,
) -> None:
    # Every parameter is read through the context: their names are the fields of RunOptions.
    given = {name: value for name, value in context.params.items() if value not in (None, ())}
    try:
        code = _serve(parse_run(given, context.obj or ()))
    except PreloadError as error:
        complain(sys.stderr, error)
        code = error.exit_status
    raise typer.Exit(code)


def _serve(options: RunOptions) -> int:
    """Run the group until it ends; the exit code. PreloadError."""
    allow_many_files(len(options.ranks) * (2 if options.drafted else 1))
    try:
        return anyio.run(Start(options, dict(os.environ), make_display(sys.stdout)).run)
    except OSError as error:
        if not is_exhausted(error):
            raise
        raise exhausted(error, "starting the group") from error
