import json
import socket
import subprocess
import sys
from contextlib import closing

import pytest

from specexport_runtime.cli import serve as command
from specexport_runtime.errors import InvalidRequestError
from specexport_runtime.server.config import ServerConfig
from tests.support.cases import patience
from tests.support.servers.server_process import ServerProcess

KEY = "a-key-that-nobody-guesses"


def fails(capsys, *arguments: str) -> tuple[int, str]:
    from specexport_runtime.cli.command import runtime_cli

    with pytest.raises(SystemExit) as end:
        runtime_cli(["serve", *arguments])
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert " Fix: " in err
    assert err.count("\n") == 1
    return end.value.code, err


NOT_ZERO = ("max-body-bytes", "max-prompts", "max-n", "max-prompt-tokens", "max-tokens", "max-connections", "threads")
NOT_ZERO += ("request-timeout", "body-timeout", "keep-alive-timeout")
BAD_OPTIONS = {
    **{(f"--{name}", "0"): f"--{name} is 0" for name in NOT_ZERO}, ("--port", "65536"): "--port is 65536",
    ("--max-waiting", "-1"): "--max-waiting is -1", ("--drain-timeout", "nan"): "--drain-timeout is nan",
    ("--log-format", "xml"): "--log-format", ("--model-name", "a b"): "--model-name is 'a b'",
    ("--thinking-budget", "-1"): "--thinking-budget is -1",
    ("--host", ""): "--host is ''", ("--allowed-host", "https://a"): "--allowed-host is 'https://a'",
    ("--allowed-host", "a:80"): "--allowed-host is 'a:80'", ("--allowed-host", "*"): "--allowed-host is '*'",
    ("--api-key", ""): "--api-key is empty", ("--host", "0.0.0.0"): "no API key was given",
    ("--host", "some-name"): "no API key was given", ("--drafter", "wish"): "--drafter",
    ("--num-speculative-tokens", "some"): "'some' is neither an integer nor 'auto'",
    ("--idle-unload", "0"): "--idle-unload is 0", ("--memory", "lots"): "--memory is 'lots'",
    ("--bundles", "/nonexistent"): "--bundles /nonexistent has no bundle in it",
    ("--api-key-file", "/nonexistent/key"): "--api-key-file /nonexistent/key cannot be read: No such file",
}  # fmt: skip


@pytest.mark.parametrize("options", BAD_OPTIONS, ids=" ".join)
def test_a_bad_value_is_named(capsys, demo_bundle, options):
    code, line = fails(capsys, str(demo_bundle), *options)
    assert code == 2
    assert BAD_OPTIONS[options] in line


@pytest.mark.parametrize("key", ["with space", "tab\t", "é", "line\n"])
def test_a_key_that_cannot_be_sent_is_refused_without_being_shown(capsys, demo_bundle, monkeypatch, key):
    _, line = fails(capsys, str(demo_bundle), "--api-key", key)
    assert "--api-key has a space or a character that is not ASCII" in line
    assert key not in line
    monkeypatch.setenv("SPECEXPORT_API_KEY", key)
    _, line = fails(capsys, str(demo_bundle))
    assert line.startswith("error: SPECEXPORT_API_KEY has a space")


def test_keys_come_from_the_flag_and_the_file_or_else_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("# ours\none\n\n  two  \none\n")
    monkeypatch.setenv("SPECEXPORT_API_KEY", "three")
    assert command.collect_keys((), None) == ("three",)
    assert command.collect_keys((), file) == ("one", "two")
    assert command.collect_keys(("zero", "one"), file) == ("zero", "one", "two")
    monkeypatch.delenv("SPECEXPORT_API_KEY")
    assert command.collect_keys((), None) == ()
    monkeypatch.setenv("SPECEXPORT_API_KEY", "")
    with pytest.raises(InvalidRequestError, match="SPECEXPORT_API_KEY is empty"):
        command.collect_keys((), None)


@pytest.mark.parametrize(("content", "message"), [(b"", "has no key"), (b"# x\n", "has no key"), (b"\xff", "not UTF-8"),
                                                  (b"good\nnot good\n", "line 2")])  # fmt: skip
def test_a_file_of_keys_is_checked(tmp_path, content, message):
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(InvalidRequestError, match=message) as error:
        command.collect_keys((), file)
    assert "not good" not in str(error.value)


def test_with_a_key_or_insecure_it_may_be_reached():
    assert not ServerConfig(host="0.0.0.0", api_keys=("k",)).is_loopback
    assert not ServerConfig(host="0.0.0.0", insecure=True).is_loopback
    assert all(ServerConfig(host=host).is_loopback for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"))


def test_the_default_drafting_is_vllms_speculative_config():
    assert command.speculative_config(None, None) is None
    assert command.speculative_config("lookup", 5) == {"method": "ngram", "num_speculative_tokens": 5}
    assert command.speculative_config(None, "auto") == {"num_speculative_tokens": "auto"}


def test_an_address_that_cannot_be_had(capsys, demo_bundle):
    with closing(socket.socket()) as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        for host, message in (
            ("127.0.0.1", f"port {port} of 127.0.0.1 is in use"),
            ("192.0.2.1", "--host 192.0.2.1 is no address of this machine"),
            ("no..name", "cannot be resolved"),
        ):
            code, line = fails(capsys, str(demo_bundle), "--host", host, "--api-key", KEY, "--port", str(port))
            assert code == 2
            assert message in line
            assert KEY not in line


def test_a_bundle_that_is_missing_or_does_not_fit(tmp_path, demo_bundle):
    newer = tmp_path / "newer"
    newer.mkdir()
    manifest = json.loads((demo_bundle / "manifest.json").read_text())
    (newer / "manifest.json").write_text(json.dumps(manifest | {"schema_version": 999}))
    for bundle, code in ((tmp_path / "none", 2), (newer, 3)):
        command_line = [sys.executable, "-m", "specexport_runtime", "serve", str(bundle), "--port", "0"]
        result = subprocess.run(command_line, capture_output=True, text=True, timeout=patience.HANG_S, check=False)
        assert (result.returncode, result.stdout) == (code, ""), result
        [line] = result.stderr.splitlines()  # it did not say that it listens
        assert line.startswith("error: ")


def test_several_bundles_that_cannot_be_told_apart_are_refused(capsys, demo_bundle, tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same").symlink_to(demo_bundle)
    (tmp_path / "a" / "two words").symlink_to(demo_bundle)
    (tmp_path / "a" / ".same.old-1").symlink_to(demo_bundle)  # what a build leaves is none
    one, other, spaced = tmp_path / "a" / "same", tmp_path / "b" / "same", tmp_path / "a" / "two words"
    for arguments, message in (
        ([], "no bundle was given"),
        ([one, other], f"{one} and {other} would be models of one name, 'same'"),
        ([one, "--bundles", tmp_path / "a"], f"{one} and {one} would be models of one name"),
        ([one, spaced], f"the name of {spaced} is 'two words'"),
        ([one, demo_bundle, "--model-name", "mine"], "--model-name was given with several bundles"),
        ([one, demo_bundle, "--max-model-len", "999999"], "max_model_len is 999999"),
        ([one, "--memory", "1MiB"], "--memory is 1.0 MiB, and"),
    ):
        code, line = fails(capsys, *map(str, arguments))
        assert (code, message in line) == (2, True), line


def test_a_folder_of_bundles_is_served_and_drained(demo_bundle, tmp_path):
    for name in ("one", "other", ".one.old-1"):
        (tmp_path / name).symlink_to(demo_bundle)
    start = ("-m", "specexport_runtime", "serve", "--bundles")
    with ServerProcess(tmp_path, "--idle-unload", "600", "--memory", "8GiB", start=start) as server:
        server.wait_until_ready()
        models = patience.get(f"{server.url}/v1/models").json()["data"]
        assert [model["id"] for model in models] == ["one", "other"]
        ask = {"prompt": "x = 1\nx =", "max_tokens": 7, "temperature": 0}
        texts = {
            patience.post(f"{server.url}/v1/completions", json=ask | {"model": name}).json()["choices"][0]["text"]
            for name in ("one", "other", "one")
        }
        assert len(texts) == 1
        server.tell()
        code, errors = server.end()
    assert code == 0
    assert [errors.count(f"{verb} {name}") for verb in ("Opened", "Closed") for name in ("one", "other")] == [1] * 4
    assert "Traceback" not in errors


def test_without_the_extra_the_package_is_named(capsys, demo_bundle, monkeypatch):
    for module in ("run", "listener", "connection"):
        monkeypatch.delitem(sys.modules, f"specexport_runtime.server.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    code, line = fails(capsys, str(demo_bundle))
    assert code == 2
    assert line == "error: uvicorn is not installed. Fix: pip install -e '.[serve]' in the clone of specexport.\n"


def test_what_the_command_says_is_what_the_server_does(demo_bundle):
    options = ("--drafter", "lookup", "--num-speculative-tokens", "3", "--max-tokens", "7", "--log-format", "json",
               "--max-num-seqs", "2", "--thinking-budget", "3")  # fmt: skip
    environment = {"SPECEXPORT_API_KEY": KEY}
    with ServerProcess(demo_bundle, "--model-name", "our-model", *options, environment=environment) as server:
        server.wait_until_ready()
        assert patience.get(f"{server.url}/ready").status_code == 200
        headers = {"Authorization": f"Bearer {KEY}"}
        assert patience.get(f"{server.url}/v1/models").status_code == 401
        models = patience.get(f"{server.url}/v1/models", headers=headers).json()["data"]
        assert [model["id"] for model in models] == ["our-model"]
        ask = {"prompt": "x = 1\nx = 1\nx = 1\nx =", "max_tokens": 7, "temperature": 0}
        answer = patience.post(f"{server.url}/v1/completions", json=ask, headers=headers).json()
        assert answer["usage"]["speculative"]["drafted"] > 0
        too_many = patience.post(f"{server.url}/v1/completions", json=ask | {"max_tokens": 8}, headers=headers)
        assert too_many.status_code == 400
        server.tell()
        code, errors = server.end()
    assert code == 0
    lines = [json.loads(line) for line in errors.splitlines()]
    assert {"/v1/completions", "/v1/models"} <= {line.get("path") for line in lines}
    messages = [line["message"] for line in lines]
    assert f"Serving our-model at {server.url}." in messages
    assert any(each.startswith("--thinking-budget has no effect: this model (") for each in messages)
    assert KEY not in errors


def test_the_compilers_command_has_it_too():
    from specexport.cli import main

    served = main.get_command(None, "serve")
    flags = [option.name for option in command.serve.params]
    assert [option.name for option in served.params] == [*flags, "draft", "quantize"]
    assert {"--api-key", "--max-num-seqs", "--drain-timeout"} <= {
        flag for option in served.params for flag in option.opts
    }
