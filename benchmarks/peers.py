"""One process of one program that decodes greedily: `against_peers.py` starts it with that program's interpreter.

It reads a job as JSON from standard input and prints what it measured as JSON. It imports nothing of ours but for our
own ways, so that each peer may live in an environment of its own. All get the same token ids.
"""

import json
import resource
import sys
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

SHORT = 8
LLAMA_DRAFT, LLAMA_NGRAM = 4, 10  # tokens: between llama.cpp's speculative example and the binding's prompt lookup
Rows = list[list[int]]
Run = Callable[[Rows, int], Rows]


def open_ours(job: dict[str, Any], **options: Any) -> Run:
    """Ours, never copying from an earlier run."""
    from specexport_runtime import SamplingParams, SpecEngine

    engine = SpecEngine.load(
        job["path"],
        enable_prefix_caching=False,
        num_threads=job["threads"],
        max_num_seqs=job["batch"],
        max_model_len=job["context"],
    )
    salts = count()

    def run(rows: Rows, tokens: int) -> Rows:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        return [result.token_ids for result in engine.generate(rows, params, cache_salt=str(next(salts)), **options)]

    return run


def open_genai(job: dict[str, Any]) -> Run:
    """onnxruntime-genai; its `genai_config.json` says how many threads it takes."""
    import onnxruntime_genai as og

    config = og.Config(job["path"])
    session = {"intra_op_num_threads": job["threads"]}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
    model = og.Model(config)

    def run(rows: Rows, tokens: int) -> Rows:
        if len({len(row) for row in rows}) > 1:
            raise ValueError("prompts of one length are needed")  # it pads on the right
        params = og.GeneratorParams(model)
        params.set_search_options(max_length=job["context"], do_sample=False, batch_size=len(rows))
        generator = og.Generator(model, params)
        generator.append_tokens([token for row in rows for token in row])
        for _ in range(tokens):
            generator.generate_next_token()
        return [[int(token) for token in generator.get_sequence(i)[-tokens:]] for i in range(len(rows))]

    return run


def open_openvino(job: dict[str, Any]) -> Run:
    """OpenVINO GenAI."""
    import numpy as np
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    options = {"scheduler_config": scheduler, "INFERENCE_NUM_THREADS": job["threads"]}
    pipeline = openvino_genai.LLMPipeline(job["path"], "CPU", **options)

    def run(rows: Rows, tokens: int) -> Rows:
        width = max(map(len, rows))
        ids = np.array([[0] * (width - len(row)) + row for row in rows], np.int64)
        mask = np.array([[0] * (width - len(row)) + [1] * len(row) for row in rows], np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(mask))
        return list(pipeline.generate(inputs, max_new_tokens=tokens, ignore_eos=True, do_sample=False).tokens)

    return run


class Llama:
    """A model of llama.cpp with its cache of several rows, through the C interface of llama-cpp-python.

    Args:
        path: GGUF file.
        job: threads, batch and context.
    """

    def __init__(self, path: str, job: dict[str, Any]) -> None:
        import llama_cpp

        self.api = llama_cpp
        self.log = llama_cpp.llama_log_callback(lambda *_: None)  # kept alive: the library calls it
        llama_cpp.llama_log_set(self.log, None)
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = job["context"] * job["batch"], job["batch"]
        params.n_batch = job["context"] * job["batch"]
        params.n_threads = params.n_threads_batch = job["threads"]
        self.context = llama_cpp.llama_init_from_model(model, params)
        self.batch = llama_cpp.llama_batch_init(job["context"] * job["batch"], 0, 1)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self.lengths = [0] * job["batch"]

    def clear(self) -> None:
        """Forget all rows."""
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        self.lengths = [0] * len(self.lengths)

    def cut(self, row: int, length: int) -> None:
        """Forget what a row has beyond a length."""
        if length < self.lengths[row]:
            self.api.llama_memory_seq_rm(self.api.llama_get_memory(self.context), row, length, -1)
            self.lengths[row] = length

    def best(self, new: Rows, wanted: Sequence[int]) -> Rows:
        """The best token after each of the last ``wanted`` new tokens of each row, in one step."""
        import numpy as np

        places, n = [], 0
        for row, (tokens, keep) in enumerate(zip(new, wanted, strict=True)):
            for i, token in enumerate(tokens):
                self.batch.token[n], self.batch.pos[n] = token, self.lengths[row] + i
                self.batch.n_seq_id[n], self.batch.seq_id[n][0] = 1, row
                self.batch.logits[n] = i >= len(tokens) - keep
                n += 1
            self.lengths[row] += len(tokens)
            places.append(range(n - keep, n))
        self.batch.n_tokens = n
        if self.api.llama_decode(self.context, self.batch):
            raise RuntimeError("llama_decode failed")

        def argmax(place: int) -> int:
            logits = self.api.llama_get_logits_ith(self.context, place)
            return int(np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())

        return [[argmax(place) for place in row] for row in places]


def repeated(text: list[int]) -> list[int]:
    """What stood after the last place of the text's two last tokens: the binding's prompt lookup."""
    for width in (2, 1):
        tail = text[-width:]
        for start in range(len(text) - width):
            if text[start : start + width] == tail:
                return text[start + width : start + width + LLAMA_NGRAM]
    return []


def open_llama(job: dict[str, Any], ngram: bool = False) -> Run:
    """llama.cpp: plain, with prompt lookup, or with the job's draft model, which drafts one row at a time."""
    target = Llama(job["path"], job)
    draft = Llama(job["draft"], job) if job["draft"] else None
    if draft is not None and job["batch"] > 1:
        raise ValueError("a draft model of llama.cpp serves one row here")

    def guess(text: list[int]) -> list[int]:
        if ngram:
            return repeated(text)
        if draft is None:
            return []
        new, guesses = text[draft.lengths[0] :], []
        for _ in range(LLAMA_DRAFT):
            [[token]] = draft.best([new], [1])
            new = [token]
            guesses.append(token)
        return guesses

    def run(rows: Rows, tokens: int) -> Rows:
        target.clear()
        if draft is not None:
            draft.clear()
        texts = [[*row, best[-1]] for row, best in zip(rows, target.best(rows, [1] * len(rows)), strict=True)]
        while (left := min(len(row) + tokens - len(text) for row, text in zip(rows, texts, strict=True))) > 0:
            guesses = [guess(text)[: left - 1] for text in texts]
            new = [[text[-1], *guessed] for text, guessed in zip(texts, guesses, strict=True)]
            found = target.best(new, [len(each) for each in new])
            for row, (text, guessed, best) in enumerate(zip(texts, guesses, found, strict=True)):
                accepted = next((i for i, token in enumerate(guessed) if token != best[i]), len(guessed))
                text.extend(best[: accepted + 1])
                target.cut(row, len(text) - 1)
                if draft is not None:
                    draft.cut(row, len(text) - 1)
        return [text[len(row) : len(row) + tokens] for row, text in zip(rows, texts, strict=True)]

    return run


OPEN: dict[str, Callable[[dict[str, Any]], Run]] = {
    "plain": lambda job: open_ours(job, speculation=False),
    "default": open_ours,
    "llama": open_llama,
    "llama-ngram": lambda job: open_llama(job, ngram=True),
    "llama-draft": open_llama,
    "genai": open_genai,
    "openvino": open_openvino,
}


def main() -> None:
    """Tokens a second of each domain, seconds to the first token, seconds to load, peak memory, and the texts."""
    job = json.load(sys.stdin)
    start = time.perf_counter()
    run = OPEN[job["way"]](job)
    loaded = time.perf_counter() - start

    def seconds(batches: list[Rows], tokens: int) -> tuple[float, Rows]:
        start = time.perf_counter()
        texts = [text for rows in batches for text in run(rows, tokens)]
        return time.perf_counter() - start, texts

    domains = {
        name: [rows[i : i + job["batch"]] for i in range(0, len(rows), job["batch"])]
        for name, rows in job["domains"].items()
    }
    run(next(iter(domains.values()))[0], SHORT)
    speeds, texts = {}, {}
    for name, batches in domains.items():
        whole, texts[name] = seconds(batches, job["tokens"])
        short, _ = seconds(batches, SHORT)
        made = sum(map(len, batches))
        speeds[name] = {
            "whole": made * job["tokens"] / whole,
            "decode": made * (job["tokens"] - SHORT) / (whole - short),
        }
    first = {length: seconds([[ids[: int(length)]] * job["batch"]], 1)[0] for length, ids in job["first"].items()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"load": loaded, "speeds": speeds, "first": first, "peak_mib": peak, "texts": texts}))


if __name__ == "__main__":
    main()
