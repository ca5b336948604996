"""The options of `preloadd run`, with what help says of them. Values stay text for `config`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, TypeVar, get_type_hints

from preloadd.launcher.option import (
    ENGINES,
    HEALTH,
    MODEL,
    NODES,
    PARALLEL,
    PROCESSES,
    Text,
    Texts,
    option,
)
from preloadd.launcher.warm_options import (
    DisableFlashinferAutotune,
    SeedListenHost,
    SeedListenPort,
    SeedSourceHost,
    SeedSourcePort,
    SeedTimeout,
    SeedTlsCa,
    SeedTlsCert,
    SeedTlsKey,
    SeedToken,
    SeedTokenFile,
    SeedWeights,
    TrustBundles,
    WarmupCacheStores,
    WarmupTimeout,
)

Function = TypeVar("Function", bound=Callable[..., object])

Model = Annotated[
    Texts,
    option(
        "model",
        MODEL,
        "PATH|ID",
        "Checkpoint folder or Hugging Face id. Required; may stand first without --model.",
    ),
]
Revision = Annotated[
    Text, option("revision", MODEL, "REV", "Branch, tag or commit of a Hugging Face id.")
]
Builder = Annotated[
    Text,
    option(
        "builder",
        MODEL,
        "native|vllm",
        "What fills the memory: the weights as they are stored, or what vLLM makes of them, for "
        "its engines. Default: native.",
    ),
]
Layout = Annotated[
    Text,
    option(
        "layout",
        MODEL,
        "auto|processed|plain|raw",
        "In which form vLLM's weights are kept: processed in GPU memory, plain in host memory, or "
        "there raw as well, which every engine processes for itself. Default: auto.",
    ),
]
Memory = Annotated[
    Text,
    option(
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
    option(
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
    option(
        "reader",
        MODEL,
        "pread|instanttensor",
        "What reads the checkpoint: preloadd itself, or the package instanttensor, for disks that "
        "are faster than that (cuda memory only). vLLM reads by itself. Default: pread.",
    ),
]
ChunkBytes = Annotated[
    Text,
    option(
        "chunk_bytes",
        MODEL,
        "SIZE",
        "Largest single allocation. Default: 1GiB in host memory, 4GiB on a GPU.",
    ),
]
Digest = Annotated[
    Text,
    option(
        "digest",
        MODEL,
        "sampled|full",
        "How one checkpoint's content is told from another's: by a sample of every tensor's bytes "
        "(blind between samples), or by all of them. Default: sampled.",
    ),
]
TensorParallelSize = Annotated[
    Texts,
    option(
        "tensor_parallel_size", PARALLEL, "N", "Slices of every layer. Default: 1.", short="-tp"
    ),
]
PipelineParallelSize = Annotated[
    Texts,
    option("pipeline_parallel_size", PARALLEL, "N", "Runs of layers. Default: 1.", short="-pp"),
]
DataParallelSize = Annotated[
    Texts,
    option(
        "data_parallel_size",
        PARALLEL,
        "N",
        "Replicas, each of the tensor size times the pipeline size in ranks. Default: 1.",
        short="-dp",
    ),
]
EnableExpertParallel = Annotated[
    bool,
    option(
        "enable_expert_parallel",
        PARALLEL,
        None,
        "Deal whole experts to ranks, not slices.",
        short="-ep",
    ),
]
ExpertPlacementStrategy = Annotated[
    Texts,
    option(
        "expert_placement_strategy",
        PARALLEL,
        "HOW",
        "linear (in blocks) or round_robin (dealt one after the other). Default: linear.",
    ),
]
Nnodes = Annotated[
    Texts,
    option(
        "nnodes",
        NODES,
        "N",
        "Nodes that share the group's ranks, in blocks of one size. Default: 1.",
        short="-n",
    ),
]
NodeRank = Annotated[
    Texts, option("node_rank", NODES, "N", "Which of them this one is, from 0.", short="-r")
]
DataParallelSizeLocal = Annotated[
    Texts,
    option(
        "data_parallel_size_local",
        NODES,
        "N",
        "Instead of --nnodes: so many replicas are on this node. Default: all.",
        short="-dpl",
    ),
]
DataParallelStartRank = Annotated[
    Texts,
    option(
        "data_parallel_start_rank",
        NODES,
        "N",
        "The number of the first of them, from 0.",
        short="-dpr",
    ),
]
MasterAddr = Annotated[
    Texts,
    option(
        "master_addr",
        NODES,
        "ADDRESS",
        "The first node, as all nodes reach it: where ranks of several nodes meet.",
    ),
]
DataParallelAddress = Annotated[
    Texts,
    option(
        "data_parallel_address",
        NODES,
        "ADDRESS",
        "The same with several replicas. Default: --master-addr.",
        short="-dpa",
    ),
]
WeightCacheMasterPort = Annotated[
    Texts,
    option(
        "weight_cache_master_port",
        NODES,
        "PORT",
        "The port there, the same on every node. Required where ranks are on several.",
    ),
]
WeightCacheDraftMasterPort = Annotated[
    Texts,
    option(
        "weight_cache_draft_master_port",
        NODES,
        "PORT",
        "The same for ranks of a draft. Default: --weight-cache-master-port + 1.",
    ),
]
MasterPort = Annotated[
    Texts,
    option(
        "master_port",
        NODES,
        "PORT",
        "The engine's, as it is given to that: no port of ours may be the same.",
    ),
]
DataParallelRpcPort = Annotated[
    Texts, option("data_parallel_rpc_port", NODES, "PORT", "Likewise.", short="-dpp")
]
RendezvousTimeout = Annotated[
    Text,
    option(
        "rendezvous_timeout",
        NODES,
        "SECONDS",
        "How long all ranks may take to meet there before they load. Default: 600.",
    ),
]
PeerSilenceTimeout = Annotated[
    Text,
    option(
        "peer_silence_timeout",
        NODES,
        "SECONDS",
        "How long a rank may not be heard there before it counts as lost. Default: 15.",
    ),
]
SocketDir = Annotated[
    Text,
    option(
        "weight_cache_socket_dir",
        ENGINES,
        "DIR",
        "Folder of the ranks' sockets, made if it is not there. "
        "Default: the first of your own that engines search.",
    ),
]
AccessGroup = Annotated[
    Texts, option("access_group", ENGINES, "GROUP", "Group that may attach. May be repeated.")
]
AccessUser = Annotated[
    Texts, option("access_user", ENGINES, "USER", "User who may attach. May be repeated.")
]
HealthHost = Annotated[
    Text, option("weight_cache_health_host", HEALTH, "HOST", "Default: 127.0.0.1.")
]
HealthPort = Annotated[
    Text,
    option(
        "weight_cache_health_port",
        HEALTH,
        "PORT",
        "Serve /healthz, /readyz and /livez here; 0 picks a free port and tells it. "
        "Default: no endpoint.",
    ),
]
NoDraft = Annotated[
    bool,
    option(
        "no_draft",
        MODEL,
        None,
        "Keep only the target of --speculative-config in memory. Default: a draft by mtp, eagle or "
        "eagle3 as well, in ranks of its own; engines load all others from disk.",
    ),
]
RestartRanks = Annotated[
    bool,
    option(
        "restart_ranks",
        PROCESSES,
        None,
        "Start a failed rank again, with the weights it had, instead of ending the group.",
    ),
]
Python = Annotated[
    Text,
    option(
        "python",
        PROCESSES,
        "PATH",
        "Interpreter of the loaders, with the engine's libraries. Default: this one.",
    ),
]
LogLevel = Annotated[
    Text, option("log_level", PROCESSES, "LEVEL", "debug, info, warning or error. Default: info.")
]


class Options:
    """All of them, in the order in which help shows them. Their names are fields of RunOptions."""

    model: Model = None
    revision: Revision = None
    builder: Builder = None
    layout: Layout = None
    no_draft: NoDraft = False
    memory: Memory = None
    gpus: Gpus = None
    reader: Reader = None
    chunk_bytes: ChunkBytes = None
    digest: Digest = None
    tensor_parallel_size: TensorParallelSize = None
    pipeline_parallel_size: PipelineParallelSize = None
    data_parallel_size: DataParallelSize = None
    enable_expert_parallel: EnableExpertParallel = False
    expert_placement_strategy: ExpertPlacementStrategy = None
    nnodes: Nnodes = None
    node_rank: NodeRank = None
    data_parallel_size_local: DataParallelSizeLocal = None
    data_parallel_start_rank: DataParallelStartRank = None
    master_addr: MasterAddr = None
    data_parallel_address: DataParallelAddress = None
    weight_cache_master_port: WeightCacheMasterPort = None
    weight_cache_draft_master_port: WeightCacheDraftMasterPort = None
    master_port: MasterPort = None
    data_parallel_rpc_port: DataParallelRpcPort = None
    rendezvous_timeout: RendezvousTimeout = None
    peer_silence_timeout: PeerSilenceTimeout = None
    weight_cache_socket_dir: SocketDir = None
    access_group: AccessGroup = None
    access_user: AccessUser = None
    seed_listen_host: SeedListenHost = None
    seed_listen_port: SeedListenPort = None
    seed_source_host: SeedSourceHost = None
    seed_source_port: SeedSourcePort = None
    seed_timeout: SeedTimeout = None
    seed_weights: SeedWeights = False
    seed_token: SeedToken = None
    seed_token_file: SeedTokenFile = None
    seed_tls_cert: SeedTlsCert = None
    seed_tls_key: SeedTlsKey = None
    seed_tls_ca: SeedTlsCa = None
    warmup_cache_stores: WarmupCacheStores = None
    trust_bundles: TrustBundles = False
    warmup_timeout: WarmupTimeout = None
    disable_flashinfer_autotune: DisableFlashinferAutotune = False
    weight_cache_health_host: HealthHost = None
    weight_cache_health_port: HealthPort = None
    restart_ranks: RestartRanks = False
    python: Python = None
    log_level: LogLevel = None


def takes_options(function: Function) -> Function:
    """Give a command, which has a context and takes whatever there is, all `Options`."""
    kinds = get_type_hints(Options, include_extras=True)
    context, *_ = inspect.signature(function, eval_str=True).parameters.values()
    taken = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=getattr(Options, name), annotation=kind
        )
        for name, kind in kinds.items()
    ]
    function.__dict__["__signature__"] = inspect.Signature([context, *taken])
    return function
