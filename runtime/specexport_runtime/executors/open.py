"""The engines of a bundle, opened by the backend that each was built for: the one place that knows them by name.

A new backend is an ``EngineBackend`` in a new module and a line of :data:`PLACES`; see ``specexport.backends``.
"""

from importlib import import_module

from specexport_runtime.abi import kv_slack
from specexport_runtime.bundle.entry import SMALL_DRAFT_PARAMETERS
from specexport_runtime.bundle.opened import Bundle
from specexport_runtime.bundle.tokenizer_load import start_loading
from specexport_runtime.errors import IncompatibleError, InvalidRequestError
from specexport_runtime.executors.base import EngineBackend, EngineRequest, Executor
from specexport_runtime.machine import max_thread_count

PLACES = {
    "ort-cpu": "specexport_runtime.executors.ort:BACKEND",
    "ort-cuda": "specexport_runtime.executors.ort_cuda:BACKEND",
    "tensorrt": "specexport_runtime.executors.trt_open:BACKEND",
    "tensorrt-rtx": "specexport_runtime.executors.trt_open:BACKEND_RTX",
}
"""Where each backend is defined, by its name in manifests."""


def find_engine_backend(name: str) -> EngineBackend | None:
    """What runs the engines of the backend ``name``; None if this runtime has nothing of that name."""
    if name not in PLACES:
        return None
    module, attribute = PLACES[name].split(":")
    backend: EngineBackend = getattr(import_module(module), attribute)
    return backend


def list_engine_backends_with(trait: str) -> str:
    """Names of the backends that have a trait of :class:`EngineBackend`, for messages: ``"ort-cpu"``."""
    return ", ".join(name for name in PLACES if getattr(find_engine_backend(name), trait))


def check_threads(count: int | None, name: str = "num_threads") -> None:
    """Refuse a number of compute threads that this machine cannot use (InvalidRequestError); None passes."""
    most = max_thread_count()
    if count is not None and not 1 <= count <= most:
        raise InvalidRequestError(f"{name} is {count}.", f"give 1 to {most}, or leave it out.")


def _has_large_draft(bundle: Bundle) -> bool:
    """Whether a bundle has a draft of a size that needs all cores, as the target does."""
    draft = bundle.manifest.models.get("draft")
    return draft is not None and draft.parameters.total >= SMALL_DRAFT_PARAMETERS


def open_executor(
    bundle: Bundle,
    role: str,  # "target", "draft" or "head"
    *,
    num_threads: int | None = None,  # compute threads on a CPU; None takes the cores really available
    spin: bool = True,  # on a CPU: let idle threads spin
    unpad_kv: bool = True,  # False loads the graph for caches that hold padding entries
    cuda_graphs: bool | None = None,  # on a GPU: replay decode and verify steps; None does so where the engine can
    share_threads: bool = False,  # on a CPU: one pool of threads for all engines of this process, if the draft is large
    gives_back: bool = False,  # memory of cache rows that is of no use goes back to the system
    target: Executor | None = None,  # the target's, opened with the same bundle: a draft head may read its caches
) -> Executor:
    """Load the engine of one model of a bundle; IncompatibleError if it does not fit this machine."""
    check_threads(num_threads)
    entry, folder = bundle.manifest.models[role], bundle.folder
    backend = find_engine_backend(entry.backend)
    if backend is None:
        raise IncompatibleError(
            f"{folder}: the {role} was built for backend {entry.backend!r}, which this runtime cannot run.",
            f"build it with --backend {next(iter(PLACES))}, or upgrade specexport.",
        )
    if not unpad_kv and not backend.has_padded_kv:
        usable = list_engine_backends_with("has_padded_kv")
        raise IncompatibleError(
            f"{folder}: padded KV needs backend {usable}; the {role} was built for {entry.backend}.",
            f"leave unpad_kv on, or build it with --backend {usable}.",
        )
    if cuda_graphs and not backend.on_gpu:
        raise InvalidRequestError(
            f"CUDA graphs are asked for, and {folder} was built for {entry.backend}.", "leave --cuda-graphs out."
        )
    executor = backend.open(
        EngineRequest(
            folder=folder,
            entry=entry,
            role=role,
            num_rows=bundle.num_rows,
            kv_capacity=bundle.max_model_len + kv_slack(bundle.manifest.lookahead),
            lookahead=bundle.manifest.lookahead,
            num_threads=num_threads,
            spin=spin,
            share_threads=share_threads and _has_large_draft(bundle),
            unpad_kv=unpad_kv,
            cuda_graphs=cuda_graphs,
            lender=target if target is not None and target.can_lend else None,
            lends=role == "target" and bundle.manifest.lends_caches,
            gives_back=gives_back,
        )
    )
    start_loading(bundle.tokenizer)
    return executor
