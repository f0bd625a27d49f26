"""An engine option is one field: keyword, flag and documentation are made of it."""

from dataclasses import MISSING, fields
from typing import Any

import click
import pytest

from specexport_runtime.cli.command import generate
from specexport_runtime.cli.options import engine_flag, get_flag_name, pop_engine_options
from specexport_runtime.cli.serve import serve
from specexport_runtime.engine_options import OPTIONS, EngineOptions, Use
from specexport_runtime.errors import InvalidRequestError

COMMANDS = {"generate": generate, "serve": serve}
USES = {"generate": {Use.ANY, Use.BATCH}, "serve": set(Use)}
DEFAULTS = {field.name: field.default for field in fields(EngineOptions)}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_has_a_default_and_is_documented(name: str) -> None:
    assert DEFAULTS[name] is not MISSING
    assert f"\n    {name}: " in (EngineOptions.__doc__ or "")
    assert OPTIONS[name].text.endswith(".")


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_have_the_flags_of_their_uses_with_the_defaults_of_the_options(command: str) -> None:
    flags = {option.name: option for option in COMMANDS[command].params if option.name in OPTIONS}
    wanted = {name for name, option in OPTIONS.items() if option.use in USES[command]}
    assert set(flags) == wanted | ({"lora"} if command != "serve" else set())
    for name, flag in flags.items():
        assert isinstance(flag, click.Option)
        assert flag.default == DEFAULTS[name]
        assert "/".join([*flag.opts, *flag.secondary_opts]) == get_flag_name(name)


@pytest.mark.parametrize(
    ("name", "line", "value"),
    [
        ("max_num_seqs", ["--max-num-seqs", "3"], 3), ("spin", ["--no-spin"], False), ("cuda_graphs", [], None),
        ("cuda_graphs", ["--no-cuda-graphs"], False), ("itl_budget_ms", ["--itl-budget-ms", "2.5"], 2.5),
        ("kv_cache_memory_bytes", ["--kv-cache-memory-bytes", "2GiB"], "2GiB"),
        ("suffix_memory_mb", ["--suffix-memory", "5"], 5),
    ],
)  # fmt: skip
def test_a_flag_gives_the_value_of_its_option(name: str, line: list[str], value: object) -> None:
    taken: list[EngineOptions] = []

    @click.command()
    @engine_flag(name)
    @click.option("--other", default=1)
    def command(**values: Any) -> None:
        taken.append(pop_engine_options(values))
        assert values == {"other": 1}

    command.main(line, standalone_mode=False)
    assert taken == [EngineOptions(**{name: value})]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_num_seqs", 0, "max_num_seqs is 0. Fix: choose a number from 1 to 4096."),
        ("prefix_rows", -1, "prefix_rows is -1. Fix: choose a number from 0 to 4096."),
        ("max_num_batched_tokens", 0, "max_num_batched_tokens is 0. Fix: give 1 or more."),
        ("itl_budget_ms", float("nan"), "itl_budget_ms is nan. Fix: give milliseconds, more than 0."),
        ("match_length", 0, "the match length of lookup drafting is 0. Fix: give an integer of 1 or more."),
        ("kv_cache_memory_bytes", "much", "kv_cache_memory_bytes is 'much'. Fix: give a number of bytes, or a size "),
    ],
)
def test_a_value_out_of_its_range_is_refused_when_the_record_is_made(name: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        EngineOptions(**{name: value})
    assert f"{caught.value.message} Fix: {caught.value.hint}".startswith(message)
