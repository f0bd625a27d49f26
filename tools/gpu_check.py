"""Everything that only a GPU can show, in one table.

    python tools/gpu_check.py run --out results            # all sections, 8 minutes at most
    python tools/gpu_check.py run --only kernels --out results
    python tools/gpu_check.py run --backend ort-cpu --tiny --out results    # a dry run on any machine
    python tools/gpu_check.py pack --sm 90 --out wheels    # where there is an index: what the GPU machine lacks
    python tools/gpu_check.py run --wheels wheels --out results             # on the GPU machine, without a network
    python tools/gpu_check.py --list

Each task runs in a separate process with a time limit: what crashes or hangs becomes a row of the report, and the
others go on. ``results.json`` and ``results.md`` are written anew after each task. A second call with the same
``--out`` runs what the first one has not finished. The checkout is used as it is: nothing has to be installed. Exit
status: 0 all reached, 1 something failed or missed its target, 2 wrong usage, 3 no GPU.
"""

import argparse
import contextlib
import ctypes
import datetime as dt
import importlib.util
import json
import math
import os
import shlex
import signal
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "runtime")]

from tools.gpu_check_lib.packages import (  # noqa: E402
    RTX_SOURCES,
    RTX_WHEELS,
    WHEELS,
    PiecesMissingError,
    install,
    pack,
    room_beside,
)
from tools.gpu_check_lib.registry import (  # noqa: E402
    CPU,
    GPU_BACKENDS,
    SECTIONS,
    estimate_of,
    function_of,
    list_tasks,
)
from tools.gpu_check_lib.rows import Recorder, Row, read_rows, write_report  # noqa: E402
from tools.gpu_check_lib.runner import Budget, Task, rows_file, run_tasks  # noqa: E402

NO_GPU = 3
MINUTES = 8.0
CARRIED = Task("wheels", SECTIONS["machine"], 0, 0)  # no task: its row is what came of installing them


def find_gpu() -> str:
    """Why there is no GPU to run on; empty if there is one."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no NVIDIA driver here (libcuda.so.1 cannot be loaded)"
    count = ctypes.c_int(0)
    status = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    if status:
        return f"the NVIDIA driver finds no GPU (CUDA error {status})"
    return "" if count.value else "the NVIDIA driver finds no GPU"


def cuda_library_folders() -> list[str]:
    """Folders of the CUDA libraries that came with torch: packages installed elsewhere do not look there."""
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or ()) if spec is not None else []
    return [str(folder) for root in roots for folder in sorted(Path(root).glob("*/lib")) if any(folder.glob("*.so.*"))]


def make_environment(work: Path, site: Path | None, *, interpret: bool) -> dict[str, str]:
    """Environment of the tasks: this checkout and the carried packages first, caches in the work folder, no hub.

    ``site`` is the folder of the carried packages. With ``interpret`` Triton interprets kernels: there is no GPU.
    """
    libraries = [*cuda_library_folders(), os.environ.get("LD_LIBRARY_PATH", "")]
    paths = [*([str(site)] if site else []), str(ROOT), str(ROOT / "runtime"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "LD_LIBRARY_PATH": os.pathsep.join(path for path in libraries if path),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "SPECEXPORT_CACHE_DIR": str(work / "cache"),
        "TRITON_CACHE_DIR": str(work / "triton"),
        **({"TRITON_INTERPRET": "1"} if interpret else {}),
    }


def run(options: argparse.Namespace) -> int:
    """``run``: every task for which there is time, and that no earlier call has finished."""
    budget = Budget(60 * options.minutes)
    backends = tuple(options.backend or GPU_BACKENDS)
    missing = find_gpu()
    out = options.out.resolve()
    try:
        tasks = list_tasks(backends, options.only or ())
        if options.tiny:  # limits are those of a machine with a GPU; a dry run may have a slow and busy one
            tasks = [task._replace(seconds=math.inf) for task in tasks]
        if options.wheels is not None and not options.wheels.is_dir():
            raise ValueError(f"there is no folder {options.wheels}.")
        calls = earlier_calls(out, settings_of(options))
    except ValueError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    if missing and backends != (CPU,):
        print(f"gpu_check: {missing}; a dry run anywhere: run --backend ort-cpu --tiny", file=sys.stderr)
        for task in tasks:
            print(f"  {task.name}: no GPU, not run", file=sys.stderr)
        return NO_GPU
    name = f"specexport-gpu-check{'-tiny' if options.tiny else ''}"
    work = (options.work or Path(tempfile.gettempdir()) / name).resolve()
    for task in tasks if options.fresh else ():
        rows_file(out, task).unlink(missing_ok=True)
    for folder in (work, out):
        folder.mkdir(parents=True, exist_ok=True)
    if options.wheels:
        _install_wheels(options.wheels, work, out)
    site = work / "site" if (work / "site").is_dir() else None
    head, about = _about(options, calls, is_dry=options.tiny or backends == (CPU,))
    run_tasks(
        tasks, budget, out, out / "log.txt",
        command=lambda task, limit: task_command(options, task, limit, work),
        environment=make_environment(work, site, interpret=bool(missing) and options.tiny),
        report=lambda _: write_report(out, rows_of_all(out), head, about),
    )  # fmt: skip
    print((out / "results.md").read_text(encoding="utf-8"))
    return int(any(row.verdict in {"failed", "missed"} for row in rows_of_all(out)))


def rows_of_all(out: Path) -> list[Row]:
    """Rows of this call and of those before it, tasks in their order."""
    tasks = dict.fromkeys([CARRIED, *list_tasks(GPU_BACKENDS), *list_tasks((CPU,))])
    return [row for task in tasks for row in read_rows(rows_file(out, task))]


def settings_of(options: argparse.Namespace) -> dict[str, object]:
    """What all calls into one folder must share."""
    return {"tiny": options.tiny, "lowering": options.lowering}


def earlier_calls(out: Path, settings: dict[str, object]) -> list[dict[str, str]]:
    """The calls whose results a folder holds; ValueError if they were made with other settings."""
    path = out / "results.json"
    if not path.is_file():
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        calls: list[dict[str, str]] = found["calls"]
        made_with = found["settings"]
    except (ValueError, KeyError) as error:
        raise ValueError(f"{path} is none of ours; take another --out.") from error
    if made_with != settings:
        raise ValueError(f"{out} holds results for {made_with}, not {settings}; take another --out.")
    return calls


def task_command(options: argparse.Namespace, task: Task, limit: float, work: Path) -> list[str]:
    """The command of one task's process."""
    words = [sys.executable, str(Path(__file__).resolve()), "task", task.name, "--title", task.title]
    words += ["--work", str(work), "--rows", str(rows_file(options.out.resolve(), task))]
    words += ["--limit", f"{limit:.1f}", "--lowering", options.lowering]
    return words + (["--tiny"] if options.tiny else [])


def _about(
    options: argparse.Namespace, calls: list[dict[str, str]], *, is_dry: bool
) -> tuple[list[str], dict[str, object]]:
    """What stands above the tables, and beside the rows in the JSON file."""
    now = dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC")
    calls = [*calls, {"time": now, "command": shlex.join(options.words), "minutes": f"{options.minutes:g}"}]
    head = ["# GPU check", ""]
    head += [f"- {call['time']}, `{call['command']}`, {call['minutes']} minutes at most" for call in calls]
    if is_dry:
        head += ["", "**A dry run: it shows that the code runs, and nothing about a GPU.**"]
    return head, {"calls": calls, "settings": settings_of(options), "dry": is_dry}


def _install_wheels(folder: Path, work: Path, out: Path) -> None:
    """Install carried wheels; what came of it is a row."""
    value, verdict = "installed", "info"
    try:
        install(folder, work)
    except PiecesMissingError as waiting:
        value = f"still to be brought: {waiting}"
    except (OSError, ValueError, tarfile.TarError) as error:
        value, verdict = f"failed: {error}", "failed"
    place = rows_file(out, CARRIED)
    place.unlink(missing_ok=True)
    Recorder(place, CARRIED.title).row(f"wheels of {folder.name}", value, verdict=verdict)  # type: ignore[arg-type]


def run_task(options: argparse.Namespace) -> int:
    """``task``: one task, in this process. For ``run``."""
    from tools.gpu_check_lib.context import Context, run_guarded

    task = Task(options.name, options.title, options.limit, 0)
    context = Context(
        Recorder(options.rows, task.title),
        options.work,
        options.limit,
        options.tiny,
        options.lowering,
    )
    run_guarded(context, options.name, function_of(options.name))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the rows are written: what native libraries do at the end of a process must not count


def run_pack(options: argparse.Namespace) -> int:
    """``pack``: what the GPU machine lacks, cut down to its architecture."""
    wheels, sources = ((*WHEELS, *RTX_WHEELS), RTX_SOURCES) if options.tensorrt_rtx else (WHEELS, ())
    try:
        pieces = pack(options.out, options.sm, wheels, sources, piece_bytes=room_beside(ROOT))
    except ValueError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    for path in pieces:
        print(f"{path.stat().st_size / 1e6:7.1f} MB  {path.relative_to(options.out)}")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="list sections and tasks, and end")
    commands = parser.add_subparsers(dest="command")
    runs = commands.add_parser("run", help="run the checks")
    runs.add_argument("--only", action="append", metavar="SECTION", help="a section or task; repeat for more")
    runs.add_argument("--backend", action="append", choices=[*GPU_BACKENDS, CPU], help="repeat for more [all of a GPU]")
    runs.add_argument("--tiny", action="store_true", help="tiny models, few measurements: a dry run")
    runs.add_argument("--out", type=Path, default=Path("gpu-check"), help="folder of the report [gpu-check]")
    runs.add_argument("--fresh", action="store_true", help="run the tasks again, whatever earlier calls found")
    runs.add_argument("--work", type=Path, help="folder of models and bundles, used again [in the temporary folder]")
    runs.add_argument("--wheels", type=Path, help="folder with what `pack` made, to install first")
    runs.add_argument("--minutes", type=float, default=MINUTES, help="time for everything [8]")
    runs.add_argument("--lowering", default="auto", help="of tensorrt: plugin [auto: TensorRT's own attention]")
    packs = commands.add_parser("pack", help="fetch what a GPU machine without a network lacks")
    packs.add_argument("--out", type=Path, required=True)
    packs.add_argument("--sm", type=int, required=True, help="architecture of the GPU, such as 90: the only one packed")
    packs.add_argument("--tensorrt-rtx", action="store_true", help="TensorRT-RTX too, for all architectures")
    task = commands.add_parser("task")
    task.add_argument("name")
    task.add_argument("--work", type=Path, required=True)
    task.add_argument("--rows", type=Path, required=True)
    task.add_argument("--limit", type=float, required=True)
    task.add_argument("--lowering", default="auto")
    task.add_argument("--title", required=True)
    task.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    options.words = ["gpu_check.py", *(sys.argv[1:] if arguments is None else arguments)]
    if not options.list and options.command is None:
        parser.error("say what to do: run, pack or --list.")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = parse(arguments)
    if options.list:
        for task in list_tasks((*GPU_BACKENDS, CPU)):
            print(f"{task.name:<26}{estimate_of(task):>5.0f} s, at most {task.seconds:>3.0f} s   {task.title}")
        return 0
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the running task is ended too
    return {"run": run, "task": run_task, "pack": run_pack}[options.command](options)


if __name__ == "__main__":
    sys.exit(main())
