"""Scores that lm-eval gets from a server, beside those of transformers for the same checkpoint.

    python benchmarks/lm_eval_scores.py engines/demo examples/demo_pair/target [--python PYTHON] [--json FILE]

`specexport serve` runs on a port of this machine, and lm-eval asks it as `local-completions`: once with batches of
token ids from several clients at a time, once with one text at a time. Its tasks are made of prompts of the demo pair,
or of --texts: to choose how a text goes on (its own end or those of others), the log-likelihood of whole texts (one of
them longer than the context), and what is generated. No data set and no hub is asked. transformers computes the same
numbers here, from the checkpoint. Exits with 1 if a log-likelihood is more than --max-difference apart, or an answer
differs.

--python is a Python that has lm-eval (`pip install 'lm-eval[api]' transformers`); this one by default. The Python that
runs this script needs specexport with the extras `cpu`, `serve` and `export`.
"""

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common import DEMO_PROMPTS, read_prompts, report

from specexport_runtime.requests.text import shared_length
from tests.support.serving import server

CHOICE, ROLLING, GENERATE = "choose_the_end", "whole_texts", "go_on"
WAYS = {"token ids, batches of 8, 4 clients": (True, 8, 4), "texts, one at a time": (False, 1, 1)}
WORDS = 24
INSTALL = "pip install 'lm-eval[api]' transformers"
DONE = "\n\n"


def make_tasks(texts: list[str], folder: Path) -> None:
    """Data and descriptions of the tasks, as lm-eval reads them."""
    middles = [re.search(r"(?<=\S)\s", text[len(text) // 2 :]) for text in texts]  # no token goes across a gap
    cuts = [len(text) // 2 + (middle.start() if middle else 0) for text, middle in zip(texts, middles, strict=True)]
    halves = [(text[:cut], text[cut:]) for text, cut in zip(texts, cuts, strict=True)]
    ends = [end for _, end in halves]
    choices = [
        {"context": start, "choices": [ends[(i + j) % len(ends)] for j in range(4)], "label": 0}
        for i, (start, _) in enumerate(halves)
    ]
    whole = [*texts, DONE.join(texts * 3)]
    data = {CHOICE: choices, ROLLING: [{"text": text} for text in whole], GENERATE: [{"text": text} for text in texts]}
    kinds = {
        CHOICE: {"output_type": "multiple_choice", "doc_to_text": "{{context}}", "doc_to_choice": "{{choices}}"}
        | {"doc_to_target": "label", "target_delimiter": "", "metric_list": [{"metric": "acc"}]},
        ROLLING: {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
        | {"metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}]},
        GENERATE: {"output_type": "generate_until", "doc_to_text": "{{text}}", "doc_to_target": ""}
        | {"generation_kwargs": {"until": [DONE], "max_gen_toks": WORDS}, "metric_list": [{"metric": "exact_match"}]},
    }
    for name, kind in kinds.items():
        lines = folder / f"{name}.jsonl"
        lines.write_text("".join(json.dumps(item) + "\n" for item in data[name]), encoding="utf-8")
        task = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(lines)}}}
        task |= {"test_split": "test", "num_fewshot": 0, **kind}
        (folder / f"{name}.yaml").write_text(json.dumps(task), encoding="utf-8")  # JSON is YAML


def ask_lm_eval(
    args: argparse.Namespace, folder: Path, port: int, way: tuple[bool, int, int], length: int
) -> dict[str, Any]:
    """What lm-eval found: its results, and for each task the arguments and answers of every request."""
    as_ids, batch, clients = way
    options = {
        "model": args.bundle.resolve().name,
        "base_url": f"http://127.0.0.1:{port}/v1/completions",
        "tokenizer": args.checkpoint.resolve(),
        "tokenizer_backend": "huggingface",
        "tokenized_requests": as_ids,
        "num_concurrent": clients,
        "max_length": length,
    }
    out = folder / f"found_{batch}"
    command = [args.python, "-m", "lm_eval", "--model", "local-completions", "--include_path", folder]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in options.items())]
    command += ["--tasks", ",".join((CHOICE, ROLLING, GENERATE)), "--batch_size", str(batch)]
    command += ["--output_path", out, "--log_samples"]
    environment = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    done = subprocess.run(
        ["env", *(f"{name}={value}" for name, value in environment.items()), *command],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"lm-eval ended with {done.returncode}:\n{done.stderr[-4000:]}")
    (results,) = out.rglob("results_*.json")
    found: dict[str, Any] = {"results": json.loads(results.read_text(encoding="utf-8"))["results"]}
    for name in (CHOICE, ROLLING, GENERATE):
        (samples,) = out.rglob(f"samples_{name}_*.jsonl")
        requests = []
        for line in samples.read_text(encoding="utf-8").splitlines():
            sample = json.loads(line)
            for (_, arguments), answers in zip(sorted(sample["arguments"].items()), sample["resps"], strict=True):
                requests.append(([arguments[key] for key in sorted(arguments)], answers[0]))
        found[name] = requests
    return found


class Reference:
    """The checkpoint in transformers, in float32.

    Args:
        checkpoint: its folder.
        length: longest prompt and answer together, as lm-eval was told.
    """

    def __init__(self, checkpoint: Path, length: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self._window = length - 2  # one for the prefix, one that is generated

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def _score(self, ids: list[int], known: int) -> tuple[float, bool]:
        """Log-likelihood of the tokens behind the first ``known``, and whether each is the likeliest."""
        torch = self._torch
        with torch.no_grad():
            logits = self._model(torch.tensor([ids])).logits[0, known - 1 : -1].double()
        own = torch.tensor(ids[known:])
        values = torch.log_softmax(logits, -1)[torch.arange(len(own)), own]
        return math.fsum(values.tolist()), bool((logits.argmax(-1) == own).all())

    def choice(self, context: str, end: str) -> tuple[float, bool]:
        """As lm-eval defines it: white space at the end of the context belongs to what follows."""
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, end = context[:-spaces], context[-spaces:] + end
        known = self._encode(context)
        return self._score([*known, *self._encode(context + end)[len(known) :]], len(known))

    def whole(self, text: str) -> tuple[float, int]:
        """Log-likelihood of a text, window by window, and its tokens."""
        tokenizer, ids, window = self._tokenizer, self._encode(text), self._window
        prefix = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        total = self._score([prefix, *ids[:window]], 1)[0]
        for start in range(window, len(ids), window):
            end = min(start + window, len(ids))
            begin = end - window - 1
            total += self._score(ids[begin:end], start - begin)[0]
        return total, len(ids)

    def go_on(self, text: str) -> str:
        """The greedy text, up to the stop text."""
        torch, ids = self._torch, self._encode(text)
        with torch.no_grad():
            made = self._model.generate(torch.tensor([ids]), max_new_tokens=WORDS, do_sample=False)[0]
        whole, before = (self._tokenizer.decode(each, skip_special_tokens=True) for each in (made, ids))
        found: str = whole[shared_length(whole, before) :].split(DONE)[0]
        return found


def compare(found: dict[str, Any], reference: Reference) -> dict[str, Any]:
    """How far apart they are, and where they disagree."""
    apart: dict[str, list[float]] = {CHOICE: [], ROLLING: []}
    wrong, tokens = [], 0
    for (context, end), (value, is_greedy) in found[CHOICE]:
        wanted, greedy = reference.choice(context, end)
        apart[CHOICE].append(abs(float(value) - wanted))
        if (str(is_greedy) == "True") != greedy:
            wrong.append(f"likeliest or not: {context[-40:]!r} {end[:40]!r}")
    for (text, *_), value in found[ROLLING]:
        wanted, count = reference.whole(text)
        apart[ROLLING].append(abs(float(value) - wanted))
        tokens = max(tokens, count)
    for (text, *_), made in found[GENERATE]:
        if (wanted_text := reference.go_on(text)) != made:
            wrong.append(f"generated: {made!r} instead of {wanted_text!r}")
    return {"apart": apart, "wrong": wrong, "longest_text": tokens}


def main() -> None:
    """Serve, let lm-eval ask, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("checkpoint", type=Path, help="folder of the bundle's target, as transformers reads it")
    parser.add_argument("--python", default=sys.executable, help="a Python with lm-eval")
    parser.add_argument("--texts", type=Path, default=DEMO_PROMPTS, help="JSONL file with a field `prompt`")
    parser.add_argument("--count", type=int, default=20, help="texts")
    parser.add_argument("--max-length", type=int, default=1024, help="longest prompt and answer together")
    parser.add_argument("--max-difference", type=float, default=1e-3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if subprocess.run([args.python, "-c", "import lm_eval, transformers"], capture_output=True, check=False).returncode:
        raise SystemExit(f"{args.python} has no lm-eval: {INSTALL}, or name another one by --python.")
    if find_spec("torch") is None or find_spec("transformers") is None:
        raise SystemExit("this Python has no transformers to compare with: pip install 'specexport[export]'.")
    record: dict[str, Any] = {}
    rows: list[tuple[str, str]] = []
    reference = Reference(args.checkpoint, args.max_length)
    with tempfile.TemporaryDirectory() as temporary, server(args.bundle, "--max-waiting", "64") as served:
        folder = Path(temporary)
        make_tasks(read_prompts(args.texts, args.count), folder)
        for name, way in WAYS.items():
            found = ask_lm_eval(args, folder, served.port, way, args.max_length)
            record[name] = found | compare(found, reference)
    for name, one in record.items():
        results = one["results"]
        rows += [
            (f"{name}: log-likelihoods of ends, most apart", f"{max(one['apart'][CHOICE]):.1e}"),
            ("  of whole texts, most apart", f"{max(one['apart'][ROLLING]):.1e}, up to {one['longest_text']} tokens"),
            ("  accuracy, perplexity of a byte", f"{results[CHOICE]['acc,none']:.3f}, "
             f"{results[ROLLING]['byte_perplexity,none']:.5f}"),
            ("  answers that differ", str(len(one["wrong"]))),
        ]  # fmt: skip
    report(f"lm-eval on {args.bundle.name}", rows, record, args.json)
    wrong = [line for one in record.values() for line in one["wrong"]]
    most = max(value for one in record.values() for values in one["apart"].values() for value in values)
    print("\n".join(wrong[:10]))
    if wrong or most > args.max_difference:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
