r"""Decoding against other programs, in turns: each turn is a fresh process of one of them.

    python benchmarks/against_peers.py engines/gemma3-270m --prompts P.jsonl \
        --peer genai=GENAI_MODEL --python genai=GENAI_ENV/bin/python \
        --peer openvino=OPENVINO_MODEL --python openvino=OPENVINO_ENV/bin/python \
        --peer llama=MODEL.gguf --python llama=LLAMA_ENV/bin/python

GENAI_MODEL is what ``python -m onnxruntime_genai.models.builder -m CHECKPOINT -o GENAI_MODEL -p fp32 -e cpu`` makes, or
``-p int4``. Its ``genai_config.json`` says how many threads it takes (``intra_op_num_threads`` of the session
options); give ours as many, or the two are not comparable. OPENVINO_MODEL is what ``optimum-cli export openvino -m
CHECKPOINT --weight-format int8 OPENVINO_MODEL`` writes; its environment needs openvino-genai. MODEL.gguf is read by
llama-cpp-python, compiled on this machine (``pip install --no-binary :all: llama-cpp-python``). Each brings libraries
of its own. All decode plainly; ``default`` is ours once more, as it drafts when nothing is asked. Greedy, one sequence
at a time. ``whole`` counts the prefill, ``decode`` is from the difference between two lengths.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from common import median, read_prompts, report

SHORT = 8
Run = Callable[[str, int], None]


def open_ours(bundle: str, num_threads: int, **options: Any) -> Run:
    """Decode with a bundle, never copying from an earlier run."""
    from specexport_runtime import SamplingParams, SpecEngine

    engine, salts = SpecEngine.load(bundle, enable_prefix_caching=False, num_threads=num_threads), count()

    def run(prompt: str, tokens: int) -> None:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        engine.generate([prompt], params, cache_salt=str(next(salts)), **options)

    return run


def open_genai(folder: str) -> Run:
    """Decode with onnxruntime-genai, past whatever ends a text."""
    import onnxruntime_genai as og

    model = og.Model(og.Config(folder))
    tokenizer = og.Tokenizer(model)

    def run(prompt: str, tokens: int) -> None:
        params = og.GeneratorParams(model)
        params.set_search_options(max_length=1024, do_sample=False)  # fewer than a sliding window are refused
        generator = og.Generator(model, params)
        generator.append_tokens(tokenizer.encode(prompt))
        for _ in range(tokens):
            generator.generate_next_token()

    return run


def open_openvino(folder: str, num_threads: int) -> Run:
    """Decode with OpenVINO GenAI, past whatever ends a text."""
    import openvino_genai

    pipeline = openvino_genai.LLMPipeline(folder, "CPU", INFERENCE_NUM_THREADS=num_threads)

    def run(prompt: str, tokens: int) -> None:
        pipeline.generate(prompt, max_new_tokens=tokens, ignore_eos=True, do_sample=False, apply_chat_template=False)

    return run


def open_llama(path: str, num_threads: int) -> Run:
    """Decode with llama.cpp, past whatever ends a text."""
    import llama_cpp

    model = llama_cpp.Llama(path, n_ctx=1024, n_threads=num_threads, n_threads_batch=num_threads, verbose=False)

    def run(prompt: str, tokens: int) -> None:
        model.reset()
        model.eval(model.tokenize(prompt.encode(), add_bos=False, special=True))
        for _ in range(tokens - 1):
            model.eval([model.sample(temp=0.0)])
        model.sample(temp=0.0)

    return run


OPEN: dict[str, Callable[[str, int], Run]] = {
    "ours": partial(open_ours, speculation=False),
    "default": open_ours,
    "llama": open_llama,
    "genai": lambda folder, _: open_genai(folder),
    "openvino": open_openvino,
}


def child(job: dict[str, Any]) -> dict[str, float]:
    """Tokens per second of one process."""
    run = OPEN[job["way"]](job["path"], job["threads"])
    run(job["prompts"][0], SHORT)
    seconds = {}
    for tokens in (job["tokens"], SHORT):
        start = time.perf_counter()
        for prompt in job["prompts"]:
            run(prompt, tokens)
        seconds[tokens] = (time.perf_counter() - start) / len(job["prompts"])
    whole, short = seconds[job["tokens"]], seconds[SHORT]
    return {"whole": job["tokens"] / whole, "decode": (job["tokens"] - SHORT) / (whole - short)}


def main() -> None:
    """Run all in turns; print medians and ratios."""
    if len(sys.argv) == 2 and sys.argv[1] == "--child":
        print(json.dumps(child(json.load(sys.stdin))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=MODEL", help="genai, openvino or llama")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=FILE", help="its interpreter")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()

    common = {
        "prompts": read_prompts(args.prompts, args.num_prompts),
        "tokens": args.tokens,
        "threads": args.threads,
    }
    peers, pythons = (dict(each.split("=", 1) for each in given) for given in (args.peer, args.python))
    if unknown := peers.keys() - (OPEN.keys() - {"ours", "default"}):
        parser.error(f"there is no peer {sorted(unknown)[0]!r}.")
    ways = dict.fromkeys(("ours", "default"), (sys.executable, args.bundle))
    ways |= {name: (pythons.get(name, sys.executable), Path(model)) for name, model in peers.items()}
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(args.repeats):
        for way, (python, path) in ways.items():
            job = json.dumps(common | {"way": way, "path": str(path)})
            done = subprocess.run([python, __file__, "--child"], input=job, capture_output=True, text=True, check=True)
            found[way].append(json.loads(done.stdout.splitlines()[-1]))
    rows = []
    for what in ("whole", "decode"):
        speeds = {way: [each[what] for each in found[way]] for way in ways}
        rows += [(f"{what}, {way}", f"{median(values):.1f} tokens/s") for way, values in speeds.items()]
        for name in peers:
            for way in ("ours", "default"):
                ratios = [ours / theirs for ours, theirs in zip(speeds[way], speeds[name], strict=True)]
                rows.append(
                    (f"{what}, {way} / {name}", f"{median(ratios):.2f}× ({', '.join(f'{x:.2f}' for x in ratios)})")
                )
    report("Decoding against other programs", rows, {"runs": found}, args.json)


if __name__ == "__main__":
    main()
