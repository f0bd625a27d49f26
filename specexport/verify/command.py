"""``specexport verify``: run the proof, print it, keep it in the bundle. Everything heavy is imported when it runs."""

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from specexport.compare import OutputResult
from specexport.report import format_number, print_json
from specexport.verify.goodness_of_fit import SamplingResult
from specexport.verify.greedy import GreedyResult
from specexport.verify.perplexity import PerplexityResult
from specexport.verify.report import VerifyReport
from specexport_runtime.cli.options import engine_flag
from specexport_runtime.errors import CheckFailedError


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--checkpoint", help="The target's checkpoint.  [default: looked for by its recorded name and hash]")
@click.option("--draft-checkpoint", help="The draft's checkpoint.  [default: as for --checkpoint]")
@click.option("--lora", metavar="NAME[=FOLDER]", help="LoRA adapter to verify with, and where it is.")
@click.option("--require-checkpoint", is_flag=True, help="Fail instead of skipping if a checkpoint is not found.")
@click.option("--trust-remote-code", is_flag=True, help="Run the checkpoint's Python code while loading.")
@click.option("--prompts", type=click.Path(path_type=Path), help="JSONL with a field `prompt`.  [default: 8 built in]")
@click.option("--text", type=click.Path(path_type=Path), help="Text for perplexity.  [default: built in, if quantized]")
@click.option("--reference", type=click.Path(path_type=Path), help="Float bundle to compare a quantized one with.")
@click.option("--max-prompts", type=int, default=8, show_default=True, help="Most prompts to use.")
@click.option("--max-tokens", type=int, default=64, show_default=True, help="Tokens for each prompt, greedy part.")
@click.option("--num-samples", type=int, default=4000, show_default=True, help="Draws of each sampling test.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the sampled draws.")
@engine_flag("num_threads")
@click.option("--report", type=click.Path(path_type=Path, dir_okay=False), help="Also write the JSON report there.")
@click.option("--no-record", is_flag=True, help="Leave the bundle as it is: no report in it, no summary.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
def verify(
    bundle: Path,
    *,
    checkpoint: str | None,
    draft_checkpoint: str | None,
    lora: str | None,
    require_checkpoint: bool,
    trust_remote_code: bool,
    prompts: Path | None,
    text: Path | None,
    reference: Path | None,
    max_prompts: int,
    max_tokens: int,
    num_samples: int,
    seed: int,
    num_threads: int | None,
    report: Path | None,
    no_record: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Prove that BUNDLE decodes losslessly: logits (of a quantized one, perplexity), greedy output, sampled output.

    A part that cannot run (no checkpoint) is reported as skipped and the result as incomplete. A part that fails makes
    the command exit with 1, after the report is written.
    """
    from specexport.atomic import write_json
    from specexport.progress import show_progress
    from specexport.verify.options import VerifyOptions
    from specexport.verify.report import record_report
    from specexport.verify.run import verify_bundle
    from specexport_runtime.cli.prompts import read_prompts, read_text
    from specexport_runtime.executors.open import check_threads

    check_threads(num_threads, "--threads")
    given = {"target": checkpoint, "draft": draft_checkpoint}
    options = VerifyOptions(
        checkpoints={role: source for role, source in given.items() if source is not None},
        lora=lora,
        require_checkpoint=require_checkpoint,
        trust_remote_code=trust_remote_code,
        prompts=None if prompts is None else [item.text for item in read_prompts(None, None, prompts)],
        texts=None if text is None else [read_text(text)],
        reference=reference,
        max_prompts=max_prompts,
        max_tokens=max_tokens,
        num_samples=num_samples,
        seed=seed,
        num_threads=num_threads,
    )
    with show_progress(sys.stderr, quiet=quiet) as progress:
        found = verify_bundle(bundle, options, progress=progress)
    if as_json:
        print_json(found.to_json())
    else:
        click.echo("\n".join(describe(found)))
    if report is not None:
        write_json(report, found.to_json())
    if not no_record:
        record_report(bundle, found)
    if found.status == "failed":
        raise CheckFailedError(
            f"{bundle}: {' and '.join(found.failed_parts)} failed.",
            "do not use this bundle; build it again, and report the model if it fails again.",
        )


def describe(report: VerifyReport) -> Iterator[str]:
    """The report in lines for a reader, the verdict first."""
    yield verdict(report)
    yield f"{report.bundle} (build {report.build_key[:16]})"
    for part in report.parts:
        yield f"{part.name:<10} {part.status}" + (f": {part.reason}" if part.reason else "")
        for result in part.results:
            if isinstance(result, OutputResult):
                yield from _describe_logits(part.name, result)
            elif isinstance(result, PerplexityResult):
                yield from _describe_perplexity(result)
            elif isinstance(result, GreedyResult):
                yield from _describe_greedy(result)
            else:
                yield from _describe_sampling(result)
    words = {"passed": "every part passed", "failed": "not lossless as measured", "incomplete": "not everything ran"}
    code = CheckFailedError.exit_code if report.status == "failed" else 0
    seconds = sum(report.seconds.values())
    yield f"verify     {report.status}: {words[report.status]} ({seconds:.0f} s); exit code {code}"


def verdict(report: VerifyReport) -> str:
    """One sentence: whether drafting changes nothing, and whether the engines compute what the checkpoints do."""
    found = {part.name: part for part in report.parts}

    def answer(*names: str) -> str:
        parts = [found[name] for name in names if name in found]
        if any(part.status == "failed" for part in parts):
            return "NO"
        skipped = next((part.reason for part in parts if part.status == "skipped"), None if parts else "it did not run")
        return "yes" if skipped is None else f"not compared, because {skipped.partition(' Fix:')[0].rstrip('.')}"

    bits = "; a token's logits the same in every step: NO" if answer("neighbours") == "NO" else ""
    drafting = f"lossless: greedy {answer('greedy')}, sampled {answer('sampling')}"
    return f"{drafting}; weights as the checkpoint's: {answer('tensors', 'perplexity')}{bits}"


def _describe_logits(part: str, result: OutputResult) -> Iterator[str]:
    rows, kinds = sum(case.rows for case in result.cases), f"{len(result.cases)} kinds of step"
    if part == "neighbours":
        found = f"within {result.max_relative:.1e} of the logit scale (limit {result.tolerance:.0e})"
        if not result.tolerance:
            found = f"bit for bit in {sum(case.same_bits for case in result.cases)} of {rows} rows"
        yield f"  {result.role}: a token's logits in {kinds} are those alone, {found}"
        yield f"    {result.compared}"
    else:
        yield (
            f"  {result.role}: max difference from eager torch {result.max_abs:.1e}, {result.max_relative:.1e} of the "
            f"logit scale (limit {result.tolerance:.0e}), {rows} logit rows in {kinds}"
        )
    for case in result.cases:
        if not case.passed:
            yield (
                f"  FAILED {result.role}, {case.name}: {case.max_relative:.3g} of the logit scale, root mean square of "
                f"a row {case.max_rms:.3g}; argmax agrees in {case.argmax_agreement:.1%} of {case.rows} rows, bits in "
                f"{case.same_bits}"
            )


def _describe_perplexity(result: PerplexityResult) -> Iterator[str]:
    kind = result.approximation or "not quantized"
    yield (
        f"  {'' if result.passed else 'FAILED '}{result.role}, {kind}: perplexity {result.perplexity:.3f}, "
        f"{result.reference}: {result.reference_perplexity:.3f}; {result.change:+.2%} on {result.num_tokens} tokens "
        f"(limit {result.limit:+.1%})"
    )
    yield (
        f"    its distributions diverge by {result.divergence:.4f} nats (limit {result.divergence_limit:g}); the same "
        f"likeliest token at {result.agreement:.1%}"
    )


def _describe_greedy(result: GreedyResult) -> Iterator[str]:
    yield f"  {result.compared}"
    for run in result.runs:
        yield (
            f"  {run.drafter}, K={run.lookahead}: {run.identical} of {result.num_prompts} outputs identical "
            f"({run.tokens_compared} tokens compared), mean accepted length "
            f"{format_number(run.mean_accepted_length, '.2f')}"
        )
    for item in result.differences:
        kind = "near-tie" if item.explained else "FAILED"
        yield (
            f"  {kind} {item.drafter}, K={item.lookahead}, prompt {item.prompt + 1}, token {item.position}: "
            f"plain {item.plain_token}, speculative {item.speculative_token}, "
            f"logit gap {item.gap:.3g} (limit {item.limit:.2g})"
        )


def _describe_sampling(result: SamplingResult) -> Iterator[str]:
    yield (
        f"  {len(result.tests)} tests; smallest p-value {result.min_p_value:.3g} (limit {result.alpha:.1e}), largest "
        f"total variation {result.max_total_variation:.3f}"
    )
    for kind, setting in dict.fromkeys((test.kind, test.setting) for test in result.tests):
        tests = [test for test in result.tests if (test.kind, test.setting) == (kind, setting) and test.cells > 1]
        if not tests:
            yield f"  {kind}, {setting}: the target is certain, nothing to test"
            continue
        worst = max(tests, key=lambda test: test.total_variation - test.expected_total_variation)
        yield (
            f"  {kind}, {setting}: {len(tests)} x {worst.samples} draws, p >= {min(t.p_value for t in tests):.3g}, "
            f"total variation {worst.total_variation:.3f} (sampling error alone {worst.expected_total_variation:.3f})"
        )
    for test in result.tests:
        if not test.passed:
            yield (
                f"  FAILED {test.kind}, {test.setting}, prompt {test.prompt + 1}: p-value {test.p_value:.3g}, "
                f"total variation {test.total_variation:.3f} (limit {test.total_variation_limit:.3f}), "
                f"{test.impossible} impossible"
            )
    if result.control_p_value is not None:
        seen = "seen" if result.control_p_value < result.alpha else "not seen: the draft is too close to the target"
        yield f"  control, every draft token accepted untested: p-value {result.control_p_value:.1g} ({seen})"
