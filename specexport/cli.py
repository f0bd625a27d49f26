"""The command line. Lists every command without importing any of them: ``specexport --help`` must be quick."""

import click

from specexport_runtime.cli.gone import removed_command_error
from specexport_runtime.cli.lazy import LazyGroup, Mount

COMMANDS = {
    "run": Mount("specexport.run.command", "run", "Answer a prompt with a model, or talk with it; built when needed."),
    "build": Mount("specexport.compile.command", "build", "Build a bundle from a target and a draft checkpoint."),
    "verify": Mount("specexport.verify.command", "verify", "Prove that a bundle decodes losslessly."),
    "inspect": Mount("specexport.inspect", "inspect", "Show what is in a bundle."),
    "generate": Mount("specexport_runtime.cli.command", "runtime_cli", "Generate text from a bundle."),
    "chat": Mount("specexport_runtime.chat.command", "chat", "Talk with a bundle's model in the terminal."),
    "serve": Mount("specexport_runtime.cli.serve", "serve", "Serve a bundle over HTTP, as OpenAI's API does."),
    "list": Mount("specexport.run.kept", "list_kept", "Show what the user's cache keeps."),
    "remove": Mount("specexport.run.kept", "remove", "Remove what the user's cache keeps."),
    "demo": Mount("specexport.demo", "demo", "Build the demo pair, stream from it, measure it against plain decoding."),
    "bench": Mount("specexport.bench.command", "bench", "Measure ways to decode with a bundle side by side."),
    "train-draft": Mount(
        "specexport.train.command", "train_draft", "Train a draft for a target, on text that it writes."
    ),
    "explain": Mount("specexport.explain.command", "explain", "Show round by round what speculation did, and saved."),
    "debug": Mount(
        "specexport.debug.command", "debug", "Compare a step layer by layer; rank the layers that hurt most."
    ),
    "simulate": Mount(
        "specexport.simulate.command", "simulate", "Expected padding and speedup of a batch, without a model."
    ),
    "doctor": Mount("specexport.doctor.command", "doctor", "Show what this machine can run, and why not."),
}
TAKE_CHECKPOINTS = ("generate", "chat", "serve")
"""Commands of the runtime that get a bundle of a checkpoint here, where the compiler is."""
REMOVED = {"tune": "specexport bench BUNDLE… --lookahead K,… --contexts L,…"}
"""Commands of earlier releases, with what does their work now."""


class _Commands(LazyGroup):
    """The table's commands; one of an earlier release is a usage error that names its successor."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command."""
        if args[0] in REMOVED and not ctx.resilient_parsing:
            raise removed_command_error(args[0], REMOVED[args[0]])
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        command = super().get_command(ctx, cmd_name)
        if command is None or cmd_name not in TAKE_CHECKPOINTS:
            return command
        from specexport.run.command import accept_checkpoints

        return accept_checkpoints(command)


@click.group(cls=_Commands, mounts=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="specexport")
def main() -> None:
    """Compile a target and a draft model into a bundle, and decode from it losslessly."""
