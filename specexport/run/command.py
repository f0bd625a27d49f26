"""``specexport run``, and checkpoints in the place of bundles for the commands of the runtime."""

import copy
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from specexport.backends.base import AUTO_MODEL_LEN
from specexport.run.bundles import (
    BundleSpec,
    CachedBundle,
    check_cached_bundle,
    find_cached_bundle,
    find_file_states,
    list_cached_bundles,
    resolve_checkpoint_path,
    short,
)
from specexport_runtime.bundle.entry import MAX_MODEL_LEN
from specexport_runtime.bundle.manifest import MANIFEST_NAME
from specexport_runtime.cli.any_text import decode_argument
from specexport_runtime.cli.options import engine_flag
from specexport_runtime.errors import BundleError, MissingDependencyError, UserInputError

_BUILD = (
    click.option("--draft", metavar="CHECKPOINT", help="Draft checkpoint, if the model is a checkpoint too."),
    click.option("--quantize", metavar="KIND", help="As for `build`, if the model is a checkpoint."),
)


def accept_checkpoints(command: click.Command) -> click.Command:
    """A command of the runtime whose bundle may be a checkpoint: it is built into the cache if it is not there."""
    made, call = copy.copy(command), command.callback
    made.params = list(command.params)
    for option in _BUILD:
        option(made)
    for param in made.params[len(command.params) :]:
        vars(param)["heading"] = "Checkpoints"
    made.params = [_with_model_type(param) if param.name == "bundle" else param for param in made.params]

    def find_and_run(draft: str | None, quantize: str | None, **values: Any) -> Any:
        click.get_current_context().obj = partial(
            find_bundle, draft=draft, quantize=quantize, max_model_len=values.get("max_model_len")
        )
        try:
            return call(**values) if call is not None else None
        except BundleError as error:
            kept = next((each for each in list_cached_bundles() if str(each.bundle) in error.message), None)
            if kept is None:
                raise
            fix = f"`specexport remove {kept.wanted.name}`, then run it again."
            raise BundleError(f"{error.message.rstrip('.')}, in the cache.", fix) from error

    made.callback = find_and_run
    return made


class ModelPath(click.Path):
    """A path, or a hub id; ``./x`` stays a path."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """From what was typed."""
        if not value:
            self.fail("it is empty: give a file, a folder or a hub id.", param, ctx)
        typed_path = isinstance(value, str) and value.startswith((".", "~"))
        return super().convert(os.path.abspath(os.path.expanduser(value)) if typed_path else value, param, ctx)


def _with_model_type(param: click.Parameter) -> click.Parameter:
    copied = copy.copy(param)
    copied.type = ModelPath()
    return copied


def find_bundle(given: Path, *, draft: str | None, quantize: str | None, max_model_len: int | None) -> Path:
    """The bundle of a model: the model itself if it is one, else what the cache keeps of it, or gets now."""
    if os.path.lexists(given / MANIFEST_NAME):
        for name, value in (("--draft", draft), ("--quantize", quantize)):
            if value is not None:
                raise UserInputError(
                    f"{name} was given, and {given} is a bundle, which has its own.", f"leave {name} out."
                )
        return given
    # A build makes room for so many unless it is told otherwise; fewer are a matter of the load.
    longer = max_model_len is not None and max_model_len > AUTO_MODEL_LEN
    wanted = BundleSpec(
        resolve_checkpoint_path(str(given)),
        None if draft is None else resolve_checkpoint_path(draft),
        quantize,
        max_model_len if longer else None,
    )
    kept = find_cached_bundle(wanted)
    look = None if kept is None else check_cached_bundle(kept)
    if kept is None or look is None or look.fault is not None:
        from specexport.compile.model import require_export_stack

        try:
            require_export_stack()
        except MissingDependencyError:
            if not os.path.lexists(given):
                return given  # a bundle's folder, most likely: the loader says that there is none
            raise
        kept = _build(wanted)
    elif look.gone:
        click.echo(f"{' and '.join(map(short, look.gone))}: gone, and this runs what was built from it", err=True)
    kept.note_use()
    return kept.bundle


def _build(wanted: BundleSpec) -> CachedBundle:
    from specexport.run.build import build_into_cache
    from specexport.run.bundles import bundles_folder
    from specexport.run.child import call_in_child

    for place in wanted.places.values():
        if os.path.isabs(place):
            find_file_states(place)  # what is wrong with it is said at once
    bundles_folder()
    call_in_child(build_into_cache, wanted)
    kept = find_cached_bundle(wanted)
    if kept is None:
        raise UserInputError(f"{wanted.name} was removed as soon as it was built.", "run it again.")
    return kept


@click.command()
@click.argument("target", type=ModelPath())
@click.argument("prompt", required=False)
@_BUILD[0]
@_BUILD[1]
@click.option("--system", type=decode_argument, metavar="TEXT", help="What the model is told before everything.")
@click.option("--max-tokens", type=int, help="Most tokens of an answer.  [default: as many as there is room for]")
@click.option("--temperature", type=float, help="0 is greedy.  [default: 0; in a conversation 0.7]")
@click.option("--seed", type=int, help="Seed of the random stream; none draws a fresh one.")
@click.option("--max-model-len", type=int, help="Most tokens of prompt and answer.  [default: 4096, or the model's]")
@engine_flag("num_threads")
@click.option("--stats", is_flag=True, help="Print counters and speed to standard error.")
@click.option("--color/--no-color", "colour", default=False, help="Colour tokens by origin.")
@click.pass_context
def run(ctx: click.Context, /, target: Path, prompt: str | None, max_tokens: int | None, **options: Any) -> None:
    """Answer PROMPT (or standard input) with TARGET, or talk with it on a terminal.

    TARGET is a .gguf file, a Hugging Face folder or a hub id, built into the cache the first time; or a bundle.
    """
    given = {name: value for name, value in options.items() if value is not None}
    talks = prompt is None and sys.stdin.isatty()
    command = _command(ctx, "chat" if talks else "generate")
    if talks:
        ctx.invoke(command, bundle=target, max_tokens=max_tokens, **given)
    else:
        most = MAX_MODEL_LEN if max_tokens is None else max_tokens
        ctx.invoke(command, bundle=target, prompt=prompt, chat=None, show_prompt=False, max_tokens=most, **given)


def _command(ctx: click.Context, name: str) -> click.Command:
    group = ctx.parent.command if ctx.parent is not None else None
    found = group.get_command(ctx, name) if isinstance(group, click.Group) else None
    if found is None:
        raise UserInputError("this installation has no chat.", "give a prompt.")
    return found
