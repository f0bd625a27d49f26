"""Models whose layers keep a state: what drafts cost, and how fast prompts are read.

    python benchmarks/hybrids.py FOLDER --kind qwen3_5 --json hybrids.json
    python benchmarks/hybrids.py FOLDER --kind qwen3_5 --self-draft

Makes a model of random weights (about 130 M parameters), builds it, and measures in turns: a step of five tokens, of
which four are drafts, against one of one token; the same with what a runtime does that can only take a snapshot of a
state and run accepted tokens again; and a prompt against transformers. With ``--self-draft``, also draft steps of the
target with every second layer off, behind drafts that were accepted.
"""

import argparse
import shutil
from pathlib import Path

import numpy as np
from common import median, report, timed

from specexport_runtime.bundle.opened import load_bundle
from specexport_runtime.executors.ort import OrtExecutor
from specexport_runtime.packing.batch import ModelRunner, RowWork

LAYERS, HIDDEN, VOCAB = 12, 1024, 4096
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 2816,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
_DELTA = {
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_SSM = {"mamba_n_heads": 32, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1}
KINDS = {
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", _COMMON | _DELTA | {"head_dim": 64}),
    "bamba": ("BambaForCausalLM", "BambaConfig", _COMMON | _SSM | {"attn_layer_indices": [3, 7, 11]}),
    "lfm2": (
        "Lfm2ForCausalLM",
        "Lfm2Config",
        _COMMON | {"layer_types": ["conv", "conv", "full_attention", "conv"] * (LAYERS // 4)},
    ),
}
DRAFTS = 4


def make_checkpoint(kind: str, folder: Path, tokenizer: Path) -> int:
    """Write a checkpoint of random weights; returns its parameters."""
    import torch
    import transformers

    model_class, config_class, config = KINDS[kind]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**config)).eval()
    model.save_pretrained(folder)
    shutil.copy(tokenizer / "tokenizer.json", folder)
    return int(model.num_parameters())


def read_with_transformers(folder: Path, tokens: list[int]) -> float:
    """Seconds in which transformers reads a prompt."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([tokens])
    with torch.no_grad():
        taken = [timed(lambda: model(ids, logits_to_keep=1))[0] for _ in range(4)]
    return median(taken[1:])


def read_arguments() -> argparse.Namespace:
    """Those of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the checkpoint and the bundle go")
    parser.add_argument("--kind", choices=KINDS, default="qwen3_5")
    parser.add_argument("--tokenizer", type=Path, default=Path("examples/demo_pair/target"))
    parser.add_argument("--quantize", choices=["int8"], help="of the bundle; without, float32 as transformers")
    parser.add_argument("--self-draft", action="store_true", help="of a target whose layers can be left out")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    """Build, measure, print."""
    args = read_arguments()
    from specexport.compile.pipeline import build_bundle
    from specexport.recipe import BuildRecipe

    form = f"{args.quantize or 'float32'}{'-self' if args.self_draft else ''}"
    checkpoint, bundle = args.folder / args.kind, args.folder / f"{args.kind}-{form}"
    parameters = make_checkpoint(args.kind, checkpoint, args.tokenizer)
    recipe = BuildRecipe(
        target=str(checkpoint),
        output=str(bundle),
        max_model_len=2048,
        lookahead=7,
        quantize=args.quantize,
        self_draft=args.self_draft,
        check=False,
    )
    build_bundle(recipe)
    entry = load_bundle(bundle).manifest.models["target"]
    executor = OrtExecutor(
        bundle / entry.engine.path, entry, num_rows=1, kv_capacity=2056, num_threads=args.threads, lookahead=7
    )
    runner = ModelRunner(executor)
    tokens = np.random.default_rng(0).integers(0, VOCAB, args.prompt).tolist()

    def step(count: int, drafts: int, accepted: int) -> None:
        """A verify step behind what the last one left; ``accepted`` of its drafts are kept."""
        known = runner.kv.kv_len(0)
        runner.step(0, [RowWork(tokens[:count], count, drafts=drafts)])
        runner.kv.commit(0, known + count - drafts + accepted)

    def replayed() -> None:
        """A verify step whose state is thrown away, and a step of the accepted tokens behind the snapshot."""
        step(1 + DRAFTS, 1 + DRAFTS, 0)
        step(1 + DRAFTS // 2, 0, 0)

    half = np.arange(executor.num_gates) // 2 % 2 == 0

    def drafted() -> None:
        """Draft steps with every second layer off, behind what the last verify step left; nothing of them is kept."""
        known = runner.kv.kv_len(0)
        executor.set_layers(half)
        for at in range(DRAFTS):
            runner.step(0, [RowWork(tokens[at : at + 1], 1, settles=False)])
            runner.kv.commit(0, known + at + 1)
        executor.set_layers(None)
        runner.kv.commit(0, known)

    ways = {
        **({"drafted": drafted} if args.self_draft else {}),
        "one": lambda: step(1, 0, 0),
        "five": lambda: step(1 + DRAFTS, DRAFTS, DRAFTS // 2),
        "replayed": replayed,
    }
    ms: dict[str, list[float]] = {name: [] for name in (*ways, "prompt")}
    for _ in range(args.repeats):
        for name, way in ways.items():
            runner.reset()
            runner.prefill(0, tokens[:256])
            step(1 + DRAFTS, DRAFTS, DRAFTS // 2)
            ms[name].append(median([timed(way)[0] * 1e3 for _ in range(args.steps + 3)][3:]))
        runner.reset()
        ms["prompt"].append(timed(lambda: runner.prefill(0, tokens))[0] * 1e3)
    executor.close()
    torch_seconds = read_with_transformers(checkpoint, tokens)
    found = {name: median(values) for name, values in ms.items()}
    state = executor_state_bytes(entry)
    drafting = []
    if args.self_draft:
        each = found["drafted"] / DRAFTS
        drafting = [("draft step of every second layer", f"{each:.2f} ms = {each / found['one']:.2f}x a step of 1")]
    rows = [
        ("parameters", f"{parameters / 1e6:.0f} M"),
        ("step of 1 token", f"{found['one']:.2f} ms"),
        ("step of 5, 4 of them drafts, 2 accepted", f"{found['five']:.2f} ms = {found['five'] / found['one']:.2f}x"),
        (
            "with a snapshot and a replay",
            f"{found['replayed']:.2f} ms = {found['replayed'] / found['five']:.2f}x of that",
        ),
        *drafting,
        (f"prompt of {args.prompt}", f"{args.prompt / found['prompt'] * 1e3:.0f} tokens/s"),
        (
            "transformers",
            f"{args.prompt / torch_seconds:.0f} tokens/s; ours is {torch_seconds / found['prompt'] * 1e3:.2f}x",
        ),
        ("a row's states", f"{state[0]} bytes, with drafts aside {state[1]} = {state[1] / state[0]:.2f}x"),
    ]
    report(f"{args.kind}, {form}", rows, {"ms": ms, "torch_seconds": torch_seconds}, args.json)


def executor_state_bytes(entry: object) -> tuple[int, int]:
    """Bytes of the states of one row, alone and with what drafts leave beside them."""
    from specexport_runtime.abi import num_pending, state_shapes

    shapes = state_shapes(entry.states, 1, num_pending(7, drafts_itself=bool(entry.engine.gates.kinds)))  # type: ignore[attr-defined]
    sizes = {name: 4 * int(np.prod(shape)) for name, shape in shapes.items()}
    return sum(size for name, size in sizes.items() if name.startswith("state")), sum(sizes.values())


if __name__ == "__main__":
    main()
