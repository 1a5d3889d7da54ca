"""The installed SGLang itself, without a server: its parser, its choice of a platform."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from anygauge.config import Config
from anygauge.plugins import Plugins
from anygauge.serving.server_plan import plan_servers
from anygauge.serving.sglang.arguments import by_name, command_line, run_arguments
from anygauge.serving.sglang.installed import installed_sglang
from anygauge.serving.sglang.kinds import plan_arguments
from anygauge_hooks.sglang import ServerKeys
from anygauge_tests.fake_engine.keys import ADMIN, OPEN
from anygauge_tests.fake_engine.options import Options
from anygauge_tests.fake_engine.server import application

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

START = """
from anygauge_cpu.env import declare_missing_operators
declare_missing_operators()
"""
PARSE = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
kinds = {}
for action in parser._actions:
    kind = "switch" if isinstance(action, argparse.BooleanOptionalAction) else "value"
    kind = "flag" if action.nargs == 0 and kind == "value" else kind
    kinds |= dict.fromkeys(action.option_strings, [action.dest, kind])
lines = [vars(parser.parse_args(line)) for line in json.loads(sys.argv[1])]
print(json.dumps([kinds, lines], default=str))
"""
PLATFORM = """
from sglang.srt.platforms import current_platform
print(type(current_platform).__module__, type(current_platform).__name__)
"""


def run(script: str, *arguments: str, **env: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", START + script, *arguments],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def lines(plugins: Plugins, make_config: Callable[..., Config]) -> list[list[str]]:
    """Return the command lines of a deployment with every kind of group."""
    groups = [
        {"kind": "prefill", "servers": 2, "sglang": {"tp_size": 2}},
        {"kind": "decode", "sglang": {"disaggregation-decode-polling-interval": 2}},
        {"kind": "encoder"},
        {"kind": "regular", "sglang": {"enable_metrics": True, "lora_paths": ["a=/x", "b=/y"]}},
        {"model": "judge", "path": "/models/judge"},
    ]
    config = make_config(Path("runs"), groups=groups)
    urls = {"encoder_urls": ["http://h:1", "http://h:2"]}
    installed = installed_sglang()
    assert installed is not None
    backend = plugins.get("register_backends", "cpu")
    asked = plugins.merged("rollout_engine_args", config=config, backend=backend, engine="sglang")
    return [
        command_line(
            {
                **by_name(asked, installed),
                **by_name(plan_arguments(config, plan), installed),
                **(urls if plan.needs_encoders else {}),
                **run_arguments(config, path=str(plan.path) if plan.path else None),
            },
            installed,
        )
        for plan in plan_servers(config)
    ]


@pytest.fixture(scope="module")
def parsed(lines: list[list[str]]) -> tuple[dict[str, list[str]], list[dict[str, Any]]]:
    kinds, records = json.loads(run(PARSE, json.dumps(lines)))
    return kinds, records


def test_what_was_read_from_the_source_is_what_the_parser_has(
    parsed: tuple[dict[str, list[str]], list[dict[str, Any]]],
) -> None:
    kinds, _ = parsed
    installed = installed_sglang()
    assert installed is not None
    ours = {option: argument for argument in installed.arguments.values() for option in argument.options}
    theirs = {option for option in kinds if not option.startswith("--no-") and option.startswith("--")}
    assert theirs - {"--help"} == ours.keys()
    for option, argument in ours.items():
        kind = argument.kind if argument.kind in ("flag", "switch") else "value"
        assert kind == kinds[option][1], option


def test_sglangs_parser_takes_the_command_line_of_each_kind_of_server(
    parsed: tuple[dict[str, list[str]], list[dict[str, Any]]], tiny_model: Path
) -> None:
    _, records = parsed
    told = ("encoder_only", "language_only", "disaggregation_mode", "encoder_urls", "tp_size")
    urls = ["http://h:1", "http://h:2"]
    assert [tuple(record[name] for name in told) for record in records] == [
        (True, False, "null", [], 1),
        (False, True, "prefill", urls, 2),
        (False, True, "prefill", urls, 2),
        (False, False, "decode", [], 1),
        (False, True, "null", urls, 1),
        (False, False, "null", [], 1),
    ]
    assert [record["model_path"] for record in records] == [str(tiny_model)] * 5 + ["/models/judge"]
    assert records[3]["disaggregation_decode_polling_interval"] == 2
    assert records[4]["enable_metrics"]
    assert {record["attention_backend"] for record in records} == {"torch_native"}
    assert {record["context_length"] for record in records} == {1024}


def test_without_our_launcher_sglang_finds_a_platform_of_its_own() -> None:
    assert run(PLATFORM).startswith("sglang.srt.platforms.")


def test_the_launchers_variables_choose_the_host_platform(plugins: Plugins) -> None:
    asked = plugins.worker_env(
        plugins.get("register_backends", "cpu"),
        role="sglang",
        deterministic=False,
        interface=None,
        ip_version="any",
        timeout_s=1800.0,
    )
    assert run(PLATFORM, **asked) == "anygauge_cpu.sglang_platform HostPlatform"


def test_stacks_of_experts_of_qwen3_vl_are_read_as_they_are_published() -> None:
    """Each is turned without a look at its shape, so exports and pushes must have them that way round."""
    found = find_spec("sglang")
    assert found is not None
    assert found.origin is not None
    source = (Path(found.origin).parent / "srt/models/qwen3_vl_moe.py").read_text()
    assert re.search(r"if is_fused_expert:\s+loaded_weight = loaded_weight\.transpose\(-1, -2\)", source)


def levels() -> dict[str, bool]:
    """Return whether a path of the server asks for the admin key, by path."""
    (root,) = find_spec("sglang").submodule_search_locations  # type: ignore[union-attr,misc]
    tree = ast.parse((Path(root) / "srt" / "entrypoints" / "http_server.py").read_text())
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef):
            marks = [ast.unparse(each) for each in node.decorator_list]
            places = [re.match(r"app\.\w+\('([^']+)'", mark) for mark in marks]
            is_admin = any("auth_level" in mark for mark in marks)
            found |= {place[1]: is_admin for place in places if place is not None}
    return found


async def played_paths() -> list[str]:
    version = installed_sglang().version  # type: ignore[union-attr]
    routes = application(Options(sglang=version)).router.routes()
    return [each.resource.canonical for each in routes if each.resource is not None]


def test_each_path_of_the_fake_engine_asks_for_the_key_that_sglang_asks_for() -> None:
    real, keys = levels(), ServerKeys(api="one", admin="two")
    played = {path for path in asyncio.run(played_paths()) if not path.startswith(("/fake/", *OPEN))}
    assert len(played) > 15
    for path in sorted(played):
        assert (path in ADMIN) == real[path], path
        assert keys.headers(path)["authorization"] == ("Bearer two" if real[path] else "Bearer one"), path
