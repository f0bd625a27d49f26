"""``specexport verify``: run the proof, print it, keep it in the bundle. Everything heavy is imported when it runs."""

import json
import sys
from pathlib import Path

import click

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
    from specexport.progress import show_progress
    from specexport.verify.describe import describe
    from specexport.verify.options import VerifyOptions
    from specexport.verify.perplexity import read_text
    from specexport.verify.prompts import read_prompts
    from specexport.verify.report import record_report, write_json
    from specexport.verify.run import verify_bundle
    from specexport_runtime.executors.open import check_threads

    check_threads(num_threads, "--threads")
    given = {"target": checkpoint, "draft": draft_checkpoint}
    options = VerifyOptions(
        checkpoints={role: source for role, source in given.items() if source is not None},
        lora=lora,
        require_checkpoint=require_checkpoint,
        trust_remote_code=trust_remote_code,
        prompts=None if prompts is None else read_prompts(prompts),
        texts=None if text is None else read_text(text),
        reference=reference,
        max_prompts=max_prompts,
        max_tokens=max_tokens,
        num_samples=num_samples,
        seed=seed,
        num_threads=num_threads,
    )
    with show_progress(sys.stderr, quiet=quiet) as progress:
        found = verify_bundle(bundle, options, progress=progress)
    click.echo(json.dumps(found.to_json()) if as_json else "\n".join(describe(found)))
    if report is not None:
        write_json(report, found)
    if not no_record:
        record_report(bundle, found)
    if found.status == "failed":
        raise CheckFailedError(
            f"{bundle}: {' and '.join(found.failed_parts)} failed.",
            "do not use this bundle; build it again, and report the model if it fails again.",
        )
