"""Minutes of clients that behave badly: what is left of them in the server's memory and in its cache rows.

    python benchmarks/soak.py engines/demo-self [--minutes 10] [--warm-up 2] [--json FILE]

The bundle has a draft model and was built with `--self-draft`: clients ask for every drafter.

This process is the server; its clients run in another one (``bad_clients.py``). They stream, wait for whole answers,
go away in the middle of an answer, of a body or of a head, reset the connection, read slowly, overflow the queue, and
send requests that are wrong in many ways. Complete greedy texts are compared with those of the engine alone. Resident
memory is read all the time. At the end every client leaves; then nothing may be active, the engine's invariants must
hold (``SpecEngine.check``), and memory may not have grown by more than --max-growth since the end of the warm-up, in
which the engine makes buffers for the step sizes that it meets (256 of each model, then old ones make room). Exits with
1 otherwise, or if a text differed, or an answer was not one of those that the request may get.
"""

import argparse
import asyncio
import json
import logging
import statistics
import sys
import time
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

from bad_clients import LONGEST
from common import DEMO_PROMPTS, read_prompts, report

from specexport_runtime import AsyncSpecEngine, SamplingParams, SpecEngine

CLIENTS = Path(__file__).with_name("bad_clients.py")


def resident_mib() -> float:
    """Resident memory of this process."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise SystemExit("this system does not tell how much memory is resident.")


async def serve(engine: SpecEngine, args: argparse.Namespace) -> dict[str, Any]:
    """Serve while the clients are at it; what was seen."""
    from specexport_runtime.server.app import create_app
    from specexport_runtime.server.config import ServerConfig
    from specexport_runtime.server.listener import bind, http_server

    config = ServerConfig(port=0, model_name="demo", max_waiting=args.max_waiting, body_timeout_s=5)
    service = AsyncSpecEngine(engine, max_waiting=config.max_waiting)
    listener = bind(config)
    server = http_server(create_app(service, config), config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    port, seconds = listener.getsockname()[1], 60 * (args.warm_up + args.minutes)
    job = {"port": port, "clients": args.clients, "seconds": seconds, "seed": args.seed, "expected": args.expected}
    clients = await asyncio.create_subprocess_exec(sys.executable, CLIENTS, stdin=PIPE, stdout=PIPE)
    talking = asyncio.create_task(clients.communicate(json.dumps(job).encode()))
    start, samples = time.monotonic(), []
    while not talking.done():
        await asyncio.wait({talking}, timeout=seconds / 200)
        load = engine.current_load()
        samples.append((time.monotonic() - start, resident_mib(), load.num_running, load.num_waiting))
    found: dict[str, Any] = json.loads((await talking)[0])
    found["active_at_end"] = await settle(service)
    server.should_exit = True
    await serving
    engine.check()  # raises if a row or a cache entry was left
    await service.aclose(0)
    return found | {"samples": samples, "growth": growth_of(samples, 60 * args.warm_up)}


async def settle(service: AsyncSpecEngine) -> int:
    """Requests that are still active some seconds after the last client left."""
    end = time.monotonic() + 10
    while service.num_active and time.monotonic() < end:
        await asyncio.sleep(0.01)
    return service.num_active


def growth_of(samples: list[tuple[float, float, int, int]], begin: float) -> float:
    """Growth of memory from the first tenth of the samples after ``begin`` to the last one."""
    measured = [mib for at, mib, *_ in samples if at >= begin] or [samples[-1][1]]
    tenth = max(len(measured) // 10, 1)
    return statistics.median(measured[-tenth:]) / statistics.median(measured[:tenth]) - 1


def expected_texts(engine: SpecEngine, prompts: list[str]) -> dict[str, str]:
    """For each prompt the longest greedy text that can be asked for."""
    results = engine.generate(prompts, SamplingParams(max_tokens=LONGEST))
    return {prompt: result.text for prompt, result in zip(prompts, results, strict=True)}


def touch_all_memory(engine: SpecEngine, prompts: list[str]) -> None:
    """Fill every cache row to its end, and run the largest steps: pages are only resident once they were written."""
    long = [engine.encode("\n\n".join(prompts[i:] + prompts[:i]))[: engine.max_model_len - 64] for i in range(8)]
    for drafter in ("draft-model", "chained", "self", "none"):
        engine.generate([*long, *long], SamplingParams(max_tokens=64, ignore_eos=True), drafter=drafter)
    engine.generate(prompts[:8], SamplingParams(max_tokens=LONGEST, temperature=0.9, logprobs=5))


def main() -> None:
    """Run the server, let the clients loose, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, default=DEMO_PROMPTS)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--warm-up", type=float, default=2, help="minutes before the clock starts")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--max-waiting", type=int, default=16)
    parser.add_argument("--threads", type=int, help="compute threads; all cores if not given")
    parser.add_argument("--max-growth", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    from specexport_runtime.server.listener import loop_factory

    # It warns of every request that is no HTTP.
    logging.getLogger("uvicorn.error").addFilter(lambda record: "Invalid HTTP" not in record.msg)
    engine = SpecEngine.load(args.bundle, num_threads=args.threads, spin=False)
    prompts = read_prompts(args.prompts, 64)
    touch_all_memory(engine, prompts)
    args.expected = expected_texts(engine, prompts)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        found = runner.run(serve(engine, args))
    memory = [mib for _, mib, *_ in found["samples"]]
    rows = [(name, str(count)) for name, count in sorted(found["counts"].items())]
    rows += [
        ("connections", str(sum(found["counts"].values()))),
        ("most running, most waiting", f"{max(s[2] for s in found['samples'])}, {max(s[3] for s in found['samples'])}"),
        ("resident memory, first, most, last", f"{memory[0]:.1f}, {max(memory):.1f}, {memory[-1]:.1f} MiB"),
        ("growth since the warm-up", f"{found['growth']:.2%}"),
        ("active at the end", str(found["active_at_end"])),
        ("problems", str(len(found["problems"]))),
    ]
    report(f"{args.minutes:g} minutes of bad clients", rows, found, args.json)
    for problem in found["problems"][:10]:
        print(problem)
    if found["problems"] or found["active_at_end"] or found["growth"] > args.max_growth:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
