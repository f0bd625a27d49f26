"""One process of one program that decodes greedily: `against_peers.py` starts it with that program's interpreter.

It reads a job as JSON from standard input and prints what it measured as JSON. It imports nothing of ours but for our
own ways, so that each peer may live in an environment of its own. All get the same token ids.
"""

import contextlib
import http.client
import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

SHORT = 8
AT_END = contextlib.ExitStack()
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


def open_ik(job: dict[str, Any], *, repacked: bool) -> Run:
    """ik_llama.cpp, plain, with its cache of several rows: the C interface that `ik-llama-cpp-python` declares."""
    import ik_llama_cpp._ctypes_api as api
    import numpy as np

    length = job["context"] * job["batch"]
    api.llama_backend_init()
    options = api.llama_model_default_params()
    options.repack_tensors, options.use_mmap = repacked, not repacked
    model = api.llama_model_load_from_file(job["path"].encode(), options)
    params = api.llama_context_default_params()
    params.n_ctx, params.n_seq_max, params.n_batch = length, job["batch"], length
    params.n_threads = params.n_threads_batch = job["threads"]
    context = api.llama_init_from_model(model, params)
    batch = api.llama_batch_init(length, 0, 1)
    vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))

    def step(new: Rows, lengths: Sequence[int]) -> list[int]:
        """The best token after the new tokens of each row."""
        n, places = 0, []
        for row, (tokens, start) in enumerate(zip(new, lengths, strict=True)):
            for i, token in enumerate(tokens):
                batch.token[n], batch.pos[n] = token, start + i
                batch.n_seq_id[n], batch.seq_id[n][0] = 1, row
                batch.logits[n] = i == len(tokens) - 1
                n += 1
            places.append(n - 1)
        batch.n_tokens = n
        if api.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        logits = (api.llama_get_logits_ith(context, place) for place in places)
        return [int(np.ctypeslib.as_array(each, (vocabulary,)).argmax()) for each in logits]

    def run(rows: Rows, tokens: int) -> Rows:
        api.llama_kv_cache_clear(context)
        best, texts = step(rows, [0] * len(rows)), [list(row) for row in rows]
        for _ in range(tokens - 1):
            for text, token in zip(texts, best, strict=True):
                text.append(token)
            best = step([text[-1:] for text in texts], [len(text) - 1 for text in texts])
        return [[*text[len(row) :], token] for row, text, token in zip(rows, texts, best, strict=True)]

    return run


def open_llama(job: dict[str, Any], speculation: str = "none") -> Run:
    """llama.cpp's own server; how it drafts is its `--spec-type`. A request a row, all at once."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    size = {"-t": job["threads"], "-tb": job["threads"], "-np": job["batch"], "-c": job["context"] * job["batch"]}
    draft = ["-md", job["draft"], "-td", job["threads"], "-tbd", job["threads"]] if job["draft"] else []
    options = [*(each for pair in size.items() for each in pair), *draft, "--spec-type", speculation]
    command = [job["llama_server"], "-m", job["path"], "--port", port, "--no-webui", *options]
    server = subprocess.Popen([str(each) for each in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    AT_END.callback(server.wait)
    AT_END.callback(server.kill)

    def ask(method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
        with connection.getresponse() as answer:
            if answer.status != http.client.OK:
                raise OSError(answer.status, answer.read().decode())
            return dict(json.load(answer))

    while True:
        if server.poll() is not None:
            raise RuntimeError(f"llama-server ended with {server.returncode}")
        with contextlib.suppress(OSError):  # it does not listen yet, or it loads
            ask("GET", "/health", {})
            break
        time.sleep(0.05)

    def run(rows: Rows, tokens: int) -> Rows:
        body = {"n_predict": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False, "return_tokens": True}
        with ThreadPoolExecutor(len(rows)) as pool:
            answers = list(pool.map(lambda row: ask("POST", "/completion", body | {"prompt": row}), rows))
        return [list(answer["tokens"]) for answer in answers]

    return run


OPEN: dict[str, Callable[[dict[str, Any]], Run]] = {
    "plain": lambda job: open_ours(job, speculation=False),
    "default": open_ours,
    "ik": lambda job: open_ik(job, repacked=False),
    "ik-repacked": lambda job: open_ik(job, repacked=True),
    "llama": open_llama,
    "llama-draft": lambda job: open_llama(job, "draft-simple"),
    "llama-ngram": lambda job: open_llama(job, "ngram-simple"),
    "llama-ngram-mod": lambda job: open_llama(job, "ngram-mod"),
    "llama-ngram-map": lambda job: open_llama(job, "ngram-map-k"),
    "llama-ngram-cache": lambda job: open_llama(job, "ngram-cache"),
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
    AT_END.close()
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 1024
    print(json.dumps({"load": loaded, "speeds": speeds, "first": first, "peak_mib": peak, "texts": texts}))


if __name__ == "__main__":
    with AT_END:
        main()
