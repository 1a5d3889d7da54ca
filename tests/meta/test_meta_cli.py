"""The surface of the command line: what is here is what users have in their scripts."""

from __future__ import annotations

import argparse

from anygauge.cli.entry import COMMANDS, make_parser

SURFACE = {
    "demo": ["--seed", "--backend"],
    "init": [
        "--model",
        "--devices",
        "--backend",
        "--engine",
        "--device-memory",
        "--gpu",
        "--task",
        "--data",
        "--out",
        "--force",
    ],
    "import": ["project", "file", "--out", "--force", "--backend"],
    "plan": ["config", "--backend", "--device-memory", "--gpu", "--json"],
    "train": ["config", "--backend", "--resume", "--overwrite", "--dry-run", "--no-file-check", "--keys"],
    "eval": ["config", "--checkpoint", "--backend", "--out"],
    "launch": ["config", "--nodes", "--devices", "--head", "--backend", "--run", "--print-head"],
    "report": ["directories", "--out"],
    "doctor": ["--backend", "--json", "--timeout"],
    "keys": ["words", "--json", "--schema"],
    "hooks": ["words", "--backend", "--json", "--strict"],
    "check-model": [
        *("directory", "--engine", "--backend", "--prompt", "--against", "--layers", "--trust-remote-code")
    ],
    "parity": ["a", "b", "--model", "--prompt", "--layers", "--trust-remote-code"],
    "convert": ["--to-megatron", "--to-hf", "--to-bfloat16", "--model", "--workers", "--check"],
}


def test_commands_and_their_options_are_as_published() -> None:
    (commands,) = [a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    surface = {
        name: [
            (action.option_strings or [action.dest])[-1]
            for action in parser._actions
            if action.dest != "help"
        ]
        for name, parser in commands.choices.items()
    }
    assert surface == SURFACE
    assert list(COMMANDS) == list(SURFACE)
