"""``specexport serve``. Imports nothing of the extra ``serve`` until it runs."""

import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from specexport_runtime.cli.grouped import GroupedCommand, add_under_heading
from specexport_runtime.cli.options import NumberOr, engine_flags, find_bundle, pop_engine_options
from specexport_runtime.engine_options import Use
from specexport_runtime.errors import MissingDependencyError, make_install_hint
from specexport_runtime.intake.speculative_config import METHODS
from specexport_runtime.server.config import ServerConfig, check_key, get_flag_name, read_keys

KEY_VARIABLE = "SPECEXPORT_API_KEY"
"""The names of drafters that ``generate`` has, and those of ``speculative_config``."""
_EXTRA = {"fastapi", "starlette", "pydantic", "uvicorn", "httptools", "prometheus_client"}


def _server_options(heading: str) -> list[Callable[[Any], Any]]:
    """An option for each field of ``ServerConfig`` of a heading."""
    found = []
    for each in fields(ServerConfig):
        if each.metadata.get("heading") == heading:
            flag, choices, text = get_flag_name(each.name), each.metadata["choices"], each.metadata["text"]
            flag = f"{flag}/--no-{flag[2:]}" if isinstance(each.default, bool) else flag
            kind = click.Choice(choices) if choices else int if each.default is None else type(each.default)
            found.append(click.option(flag, each.name, type=kind, default=each.default, show_default=True, help=text))
    return found


_NAME = click.option("--model-name", help="Name of the model for clients.  [default: the bundle folder's name]")
_KEYS = (
    click.option(
        "--api-key",
        "api_keys",
        multiple=True,
        metavar="KEY",
        help="Key that requests must carry (`Authorization: Bearer KEY`). Repeatable. Others can read it in the list "
        f"of processes: better set {KEY_VARIABLE}, or use --api-key-file.",
    ),
    click.option("--api-key-file", type=click.Path(path_type=Path), help="File with one key a line."),
    click.option("--insecure", is_flag=True, help="Bind to another address than loopback without a key."),
    click.option(
        "--allowed-host",
        "allowed_hosts",
        multiple=True,
        metavar="NAME",
        help="Name that the Host header may have besides localhost. Repeatable. Only looked at without a key.",
    ),
)
_DRAFTING = (
    click.option(
        "--drafter",
        type=click.Choice(list(METHODS)),
        help="How to draft for requests that do not say.  [default: auto; the draft model with a number of tokens]",
    ),
    click.option(
        "--num-speculative-tokens",
        "--lookahead",
        type=NumberOr("auto", "auto"),
        metavar="N|auto",
        help="Draft tokens a round for requests that do not say, or auto: chosen every round.  [default: auto; "
        "with a drafter 4, for lookup 7, for self 3, or less if less was built]",
    ),
)


@click.command(
    cls=GroupedCommand,
    first="host port model_name api_keys drafter num_speculative_tokens max_num_seqs max_model_len num_threads "
    "log_format",
)
@click.argument("bundle", type=click.Path(path_type=Path))
@add_under_heading("Server", *_server_options("Server"), _NAME)
@add_under_heading("Access", *_KEYS)
@add_under_heading("Limits", *_server_options("Limits"))
@add_under_heading("Text", *_server_options("Text"))
@add_under_heading("Drafting", *_DRAFTING)
@engine_flags(Use.ANY, Use.BATCH, Use.SERVER)
def serve(
    bundle: Path,
    drafter: str | None,
    num_speculative_tokens: int | str | None,
    model_name: str | None,
    api_keys: tuple[str, ...],
    api_key_file: Path | None,
    **options: Any,
) -> int:
    """Serve BUNDLE over HTTP, as OpenAI's API does."""
    from specexport_runtime.bundle.manifest import load_manifest
    from specexport_runtime.bundle.opened import check_num_seqs

    settings = {name: options.pop(name) for name in list(options) if name in ServerConfig.__dataclass_fields__}
    if model_name is not None:
        settings["model_name"] = model_name
    config = ServerConfig(api_keys=collect_keys(api_keys, api_key_file), **settings)
    if options["max_num_seqs"] is not None:
        check_num_seqs(options["max_num_seqs"], "--max-num-seqs")
    drafting = speculative_config(drafter, num_speculative_tokens)
    engine = replace(pop_engine_options(options), speculative_config=drafting, share_threads=True)
    run = _import_run()
    bundle = find_bundle(bundle)
    load_manifest(bundle)  # a mistyped folder is said before the server says that it listens
    if model_name is None:
        config = replace(config, model_name=_folder_name(bundle))
    return run(bundle, config, engine)


def _folder_name(bundle: Path) -> str:
    """What the model is called: its folder, or the link to it, in letters that JSON has."""
    return os.fsencode(os.path.basename(os.path.abspath(bundle))).decode("utf-8", "backslashreplace")


def collect_keys(given: tuple[str, ...], file: Path | None) -> tuple[str, ...]:
    """Keys of the command line and of the file, else of the environment; InvalidRequestError if one is unusable."""
    for key in given:
        check_key(key, "--api-key")
    keys = given if file is None else (*given, *read_keys(file))
    if not keys and KEY_VARIABLE in os.environ:
        check_key(os.environ[KEY_VARIABLE], KEY_VARIABLE)
        keys = (os.environ[KEY_VARIABLE],)
    return tuple(dict.fromkeys(keys))


def speculative_config(drafter: str | None, num_tokens: int | str | None) -> dict[str, Any] | None:
    """The default drafting options of ``SpecEngine.load``; None for its own."""
    config: dict[str, Any] = {}
    if drafter is not None:
        config["method"] = METHODS[drafter]
    if num_tokens is not None:
        config["num_speculative_tokens"] = num_tokens
    return config or None


def _import_run() -> Callable[..., int]:
    try:
        from specexport_runtime.server.run import run_server
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in _EXTRA:
            raise
        raise MissingDependencyError(f"{error.name} is not installed.", make_install_hint("serve")) from None
    return run_server
