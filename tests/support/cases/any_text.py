"""What holds for the texts that any command is given."""

import click


def assert_texts_are_utf8(command: click.Command) -> None:
    options = {each.name: each.type for each in command.params if getattr(each, "metavar", None) == "TEXT"}
    assert options
    for name, kind in options.items():
        assert kind("é 日".encode().decode("ascii", "surrogateescape")) == "é 日", name
        assert kind("é") == "é"
