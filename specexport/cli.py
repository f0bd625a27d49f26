"""The command line. Lists every command without importing any of them: ``specexport --help`` must be quick."""

import importlib
import importlib.util
from typing import NamedTuple

import click

from specexport_runtime.cli.errors import SuggestingGroup
from specexport_runtime.cli.gone import refuse_gone


class _Mount(NamedTuple):
    """Where a command lives."""

    module: str  # imported when the command is used
    attribute: str  # a click command in it, or a group that has the command
    help: str  # one line for the list of commands


COMMANDS = {
    "build": _Mount("specexport.compile.command", "build", "Build a bundle from a target and a draft checkpoint."),
    "verify": _Mount("specexport.verify.command", "verify", "Prove that a bundle decodes losslessly."),
    "inspect": _Mount("specexport.inspect", "inspect", "Show what is in a bundle."),
    "generate": _Mount("specexport_runtime.cli.command", "runtime_cli", "Generate text from a bundle."),
    "chat": _Mount("specexport_runtime.cli.chat.command", "chat", "Talk with a bundle's model in the terminal."),
    "serve": _Mount("specexport_runtime.cli.serve", "serve", "Serve a bundle over HTTP, as OpenAI's API does."),
    "demo": _Mount(
        "specexport.demo", "demo", "Build the demo pair, stream from it, measure it against plain decoding."
    ),
    "bench": _Mount("specexport.bench.command", "bench", "Measure ways to decode with a bundle side by side."),
    "train-draft": _Mount(
        "specexport.train.command", "train_draft", "Train a draft for a target, on text that it writes."
    ),
    "explain": _Mount("specexport.explain.command", "explain", "Show round by round what speculation did, and saved."),
    "debug": _Mount(
        "specexport.debug.command", "debug", "Compare a step layer by layer; rank the layers that hurt most."
    ),
    "simulate": _Mount(
        "specexport.simulate.command", "simulate", "Expected padding and speedup of a batch, without a model."
    ),
    "doctor": _Mount("specexport.doctor", "doctor", "Show what this machine can run, and why not."),
}
GONE = {"tune": "specexport bench BUNDLE… --lookahead K,… --contexts L,…"}
"""Commands of earlier releases, with what does their work now."""


class LazyGroup(SuggestingGroup):
    """A group whose commands are imported when they are used; a part that is not installed hides its commands only."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # click's signature
        """Names of the commands that are installed, in the order of the table."""
        return [name for name, mount in COMMANDS.items() if _is_installed(mount.module)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        mount = COMMANDS.get(cmd_name)
        if mount is None or not _is_installed(mount.module):
            return None
        command = getattr(importlib.import_module(mount.module), mount.attribute)
        if isinstance(command, click.Group):
            return command.get_command(ctx, cmd_name)
        return command if isinstance(command, click.Command) else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command; one of an earlier release is a usage error that names its successor."""
        if args[0] in GONE and not ctx.resilient_parsing:
            raise refuse_gone(args[0], GONE[args[0]])
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from the table, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name].help) for name in self.list_commands(ctx)])


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the module's package is missing
        return False


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="specexport")
def main() -> None:
    """Compile a target and a draft model into a bundle, and decode from it losslessly."""
