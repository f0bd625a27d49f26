"""Memory of the KV arena: its bytes by shape, and resident memory while every row is filled and decoded to its end.

python benchmarks/memory.py engines/demo --rows 16
"""

import argparse
import os
from pathlib import Path

import numpy as np
from common import report

from specexport_runtime.abi import kv_slack
from specexport_runtime.bundle.opened import load_bundle
from specexport_runtime.executors.ort import OrtExecutor
from specexport_runtime.packing.batch import ModelRunner, RowWork


def resident_bytes() -> int:
    """Resident memory of this process (Linux)."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fill(runner: ModelRunner, rows: int, steps: int, chunk: int) -> None:
    """Prefill every row in chunks, then decode all rows together, raggedly, until one is full."""
    random = np.random.default_rng(0)
    capacity, vocab = runner.kv.capacity, runner.executor.vocab_size
    prompt = capacity - steps
    for row in range(rows):
        for start in range(0, prompt, chunk):
            tokens = random.integers(0, vocab, min(chunk, prompt - start)).tolist()
            runner.step(row, [RowWork(tokens, 1)])
            runner.kv.commit(row, start + len(tokens))
    while min(room := [capacity - runner.kv.entries(row) for row in range(rows)]):
        counts = [min(int(random.integers(1, 9)), left) for left in room]
        runner.step(0, [RowWork(random.integers(0, vocab, count).tolist(), 1) for count in counts])
        for row, count in enumerate(counts):
            runner.kv.commit(row, runner.kv.kv_len(row) + count)


def main() -> None:
    """Load, make the arena resident, take a step of each kind, fill every row; print what each added."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--role", choices=["target", "draft"], default="target")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=64, help="entries of each row that are left to decoding")
    parser.add_argument("--chunk", type=int, default=64, help="prompt tokens of one step")
    parser.add_argument("--padded", action="store_true", help="measure the padded-KV graph")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    bundle = load_bundle(args.bundle, max_num_seqs=args.rows)
    entry = bundle.manifest.models[args.role]
    executor = OrtExecutor(
        args.bundle / (entry.engine.padded if args.padded else entry.engine).path,
        entry,
        num_rows=args.rows,
        kv_capacity=bundle.max_model_len + kv_slack(bundle.manifest.lookahead),
        num_threads=args.threads,
        unpad_kv=not args.padded,
    )
    layers = entry.attention.layers
    by_shape = sum(
        args.rows * executor.kv_capacity * layer.kv_heads * (layer.k_dim + layer.v_dim) * 4 for layer in layers
    )
    runner = ModelRunner(executor, unpad_kv=not args.padded)
    resident = [resident_bytes()]
    for row in (*range(1, args.rows), 0):  # write to every entry: memory is resident only then
        executor.move_row(row - 1 if row else args.rows - 1, row, executor.kv_capacity)
    resident.append(resident_bytes())
    # The engine's own workspaces, which do not depend on the arena, are there after one step of each kind.
    runner.step(0, [RowWork([1] * args.chunk, 1)])
    runner.step(0, [RowWork([1] * 8, 1)] * args.rows)
    runner.reset()
    resident.append(resident_bytes())
    fill(runner, args.rows, args.steps, args.chunk)
    resident.append(resident_bytes())
    loaded, arena, workspace, filled = resident[0], *np.diff(resident).tolist()
    sizes = {
        "arena": executor.kv_bytes,
        "by_shape": by_shape,
        "loaded": loaded,
        "growth_arena": arena,
        "growth_workspace": workspace,
        "growth_filled": filled,
    }
    rows = [
        (f"arena: {args.rows} rows x {executor.kv_capacity} entries, {len(layers)} layers", f"{by_shape / 1e6:.1f} MB"),
        ("arena as allocated", f"{executor.kv_bytes / 1e6:.1f} MB, {executor.kv_bytes / by_shape:.3f}x"),
        ("resident, engine loaded", f"{loaded / 1e6:.1f} MB"),
        ("+ every entry of the arena written to", f"{arena / 1e6:.1f} MB, {arena / by_shape:.3f}x of the arena"),
        ("+ workspaces of the first steps", f"{workspace / 1e6:.1f} MB"),
        ("+ all rows filled and decoded to their end", f"{filled / 1e6:.1f} MB, {filled / by_shape:.3f}x of the arena"),
    ]
    report(f"KV memory of the {args.role}, {args.bundle.name}", rows, {"bytes": sizes}, args.json)


if __name__ == "__main__":
    main()
