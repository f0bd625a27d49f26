"""Chat's options are those of the core's commands: flags of engine options, and texts in any letters."""

from dataclasses import fields

from specexport_runtime.chat.command import chat
from specexport_runtime.cli.options import get_flag_name
from specexport_runtime.engine_options import OPTIONS, EngineOptions, Use
from tests.support.cases.any_text import assert_texts_are_utf8


def test_chat_has_the_flags_of_its_use_with_the_defaults_of_the_options() -> None:
    defaults = {field.name: field.default for field in fields(EngineOptions)}
    flags = {option.name: option for option in chat.params if option.name in OPTIONS}
    assert set(flags) == {name for name, option in OPTIONS.items() if option.use is Use.ANY} | {"lora"}
    for name, flag in flags.items():
        assert flag.default == defaults[name]
        assert "/".join([*flag.opts, *flag.secondary_opts]) == get_flag_name(name)


def test_texts_of_the_command_line_are_utf8_whatever_the_locale() -> None:
    assert_texts_are_utf8(chat)
