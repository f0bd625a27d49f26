"""``python -m specexport_runtime``: the runtime's commands where only the runtime is installed."""

from specexport_runtime.cli.command import runtime_cli

if __name__ == "__main__":
    runtime_cli(prog_name="python -m specexport_runtime")
