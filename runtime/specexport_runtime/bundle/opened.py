"""Opening a bundle folder: checks, tokenizer, chat template, executors by backend name."""

import hashlib
import json
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from specexport_runtime.abi import StepShape, kv_slack
from specexport_runtime.bundle.files import check_files
from specexport_runtime.bundle.manifest import SMALL_DRAFT_PARAMETERS, Manifest, ModelEntry, load_manifest
from specexport_runtime.bundle.tokenizer_load import load_tokenizer, start_loading
from specexport_runtime.errors import BundleError, IncompatibleError, InvalidRequestError
from specexport_runtime.executors.base import Executor

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_NAME = "tokenizer.json"
CHAT_TEMPLATE_NAME = "chat_template.jinja"
GPU_BACKENDS = ("tensorrt", "tensorrt-rtx", "ort-cuda")


class Bundle(NamedTuple):
    """A bundle that passed its checks.

    Attributes:
        folder: where it lies.
        manifest: its metadata.
        tokenizer: tokenizer of all its models.
        chat_template: Jinja source; None if the checkpoint had none.
        max_model_len: most tokens of one sequence, as asked for.
        max_num_seqs: cache rows, as asked for.
    """

    folder: Path
    manifest: Manifest
    tokenizer: "Tokenizer"
    chat_template: str | None
    max_model_len: int
    max_num_seqs: int

    def make_executor(
        self,
        role: str,
        *,
        num_threads: int | None = None,
        spin: bool = True,
        unpad_kv: bool = True,
        cuda_graphs: bool | None = None,
        prepacked: bool = True,
    ) -> Executor:
        """Load the engine of one model (``"target"`` or ``"draft"``); ``unpad_kv=False`` loads its padded-KV graph.

        ``num_threads``, ``spin`` and ``prepacked`` are for the CPU: ``prepacked`` keeps packed weights in the user's
        cache, where all processes map them (:mod:`specexport_runtime.executors.prepacked`). ``cuda_graphs`` is for
        GPUs: record decode and verify steps and replay them; None does so with TensorRT only.

        The threads of two engines must not fight for the same cores: while one runs, the idle threads of the other
        would still spin. So a small draft runs on the calling thread alone, and a large one does not spin. With both
        spinning on two threads, a round of the demo pair took twice as long.

        Raises:
            IncompatibleError: the engine's backend is unknown to this runtime, has no padded-KV graph, or does not fit
                this machine or ``max_num_seqs``.
            MissingDependencyError: what the backend runs on is not installed.
            InvalidRequestError: CUDA graphs are asked for on the CPU.
        """
        entry = self.manifest.models[role]
        if entry.backend in GPU_BACKENDS:
            if not unpad_kv:
                raise IncompatibleError(
                    f"{self.folder}: padded KV needs backend ort-cpu; the {role} was built for {entry.backend}.",
                    "leave unpad_kv on, or build it with --backend ort-cpu.",
                )
            return self._make_gpu_executor(role, entry, cuda_graphs=cuda_graphs)
        if entry.backend != "ort-cpu":
            raise IncompatibleError(
                f"{self.folder}: the {role} was built for backend {entry.backend!r}, which this runtime cannot run.",
                "build it with --backend ort-cpu, or upgrade specexport.",
            )
        if cuda_graphs:
            raise InvalidRequestError(
                f"CUDA graphs are asked for, and {self.folder} was built for ort-cpu.", "leave --cuda-graphs out."
            )
        path = entry.path if unpad_kv else entry.padded_path
        if path is None:
            raise IncompatibleError(f"{self.folder}: the {role} has no padded-KV graph.", "build it again.")
        from specexport_runtime.executors.ort import OrtExecutor

        if role == "draft":
            small = entry.num_parameters < SMALL_DRAFT_PARAMETERS
            num_threads, spin = (1 if small else num_threads), spin and small
        executor = OrtExecutor(
            self.folder / path,
            entry,
            num_rows=self.max_num_seqs,
            kv_capacity=self.max_model_len + kv_slack(self.manifest.lookahead),
            num_threads=num_threads,
            spin=spin,
            unpad_kv=unpad_kv,
            engine_hash=self._engine_hash(path) if prepacked else None,
            full_hash=self._engine_hash(entry.full_path) if prepacked and entry.full_path else None,
        )
        start_loading(self.tokenizer)
        return executor

    def _engine_hash(self, path: str) -> str:
        """Hash of a graph of this bundle and of the weights beside it, from the manifest's hashes."""
        parent = PurePosixPath(path).parent
        files = self.manifest.files
        weights = [name for name in files if PurePosixPath(name).parent == parent and name.endswith(".data")]
        hashes = [(PurePosixPath(name).name, files[name].sha256) for name in (path, *sorted(weights))]
        return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()

    def _make_gpu_executor(self, role: str, entry: ModelEntry, *, cuda_graphs: bool | None) -> Executor:
        if entry.backend == "ort-cuda":
            from specexport_runtime.executors.ort_cuda import OrtCudaExecutor

            made = OrtCudaExecutor(
                self.folder / entry.path,
                entry,
                num_rows=self.max_num_seqs,
                kv_capacity=self.max_model_len + kv_slack(self.manifest.lookahead),
                cuda_graphs=bool(cuda_graphs),
            )
            if cuda_graphs:
                made.capture(self._round_shapes(role))
            return made
        from specexport_runtime.executors.trt_open import open_executor

        use_graphs = cuda_graphs is None or cuda_graphs
        return open_executor(entry, self.folder, role, num_rows=self.max_num_seqs, use_graphs=use_graphs)

    def _round_shapes(self, role: str) -> list[StepShape]:
        """Steps that rounds are made of: one token a row, and what verifies (or catches up), for every batch size."""
        width = self.manifest.lookahead + 1 if role == "target" else 2
        logits = width if role == "target" else 1
        rows = range(1, self.max_num_seqs + 1)
        return [
            StepShape(0, count, count * new, new, count * wanted)
            for new, wanted in ((1, 1), (width, logits))
            for count in rows
        ]


def load_bundle(folder: Path, *, max_model_len: int | None = None, max_num_seqs: int = 8) -> Bundle:
    """Open ``folder``, checking its versions and the hash of every file that was not checked here before.

    Args:
        folder: bundle folder.
        max_model_len: most tokens of one sequence; None takes the bundle's limit.
        max_num_seqs: cache rows.

    Raises:
        BundleError: the folder is no bundle, or a file is missing or altered.
        IncompatibleError: another schema or ABI.
        InvalidRequestError: a limit is out of range.
    """
    manifest = load_manifest(folder)
    if max_model_len is not None and not 2 <= max_model_len <= manifest.max_model_len:
        raise InvalidRequestError(
            f"max_model_len is {max_model_len}; this bundle allows 2 to {manifest.max_model_len}.",
            "choose a number in that range, or build with a larger --max-model-len.",
        )
    if not 1 <= max_num_seqs <= 4096:
        raise InvalidRequestError(f"max_num_seqs is {max_num_seqs}.", "choose a number from 1 to 4096.")
    known = check_files(folder, manifest.files, remember=True)
    if "target" not in manifest.models:
        raise BundleError(f"{folder}: the manifest names no target model.", "build it again.")
    template = folder / CHAT_TEMPLATE_NAME
    return Bundle(
        folder,
        manifest,
        load_tokenizer(folder / TOKENIZER_NAME, background=known and manifest.models["target"].backend == "ort-cpu"),
        template.read_text(encoding="utf-8") if CHAT_TEMPLATE_NAME in manifest.files else None,
        max_model_len or manifest.max_model_len,
        max_num_seqs,
    )
