"""TRL's calls in a Python script: their arguments, as far as the text tells them. Nothing is executed."""

from __future__ import annotations

import ast
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, TypeGuard

from anygauge.migrate.table import Input, Unresolved

__all__ = ["TASK", "function_names", "read_script"]

CHANGERS = ("update", "setdefault", "pop", "popitem", "clear")
"""Methods that change a dict."""
LONGEST_SOURCE = 60
TASK, LOAD = "task", "load_dataset"
CONFIGS = {"GRPOConfig": "grpo", "RLOOConfig": "rloo", "SFTConfig": "sft"}
TRAINERS = {"GRPOTrainer": "grpo", "RLOOTrainer": "rloo", "SFTTrainer": "sft"}
TASKS = {**CONFIGS, **TRAINERS}
PEFT = "LoraConfig"
POSITIONAL = {
    **dict.fromkeys(CONFIGS, ("output_dir",)),
    **dict.fromkeys(TRAINERS, ("model", "reward_funcs", "args", "train_dataset")),
    "SFTTrainer": ("model", "args", "data_collator", "train_dataset"),
}
LORA = {"r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save"}
LORA_RANK = 8
"""Default of PEFT's ``LoraConfig``; the one of TRL's ``ModelConfig`` is 16."""
PARSER = (
    "the script takes arguments on its command line too (TrlParser): import a shell script with it, "
    "such as `trl grpo --learning_rate 1e-5`, for those"
)


def read_script(text: str) -> Input:
    """Read the arguments of the first config, trainer and ``LoraConfig`` of a script.

    :raises ValueError: It is not Python, or has no config and no trainer of TRL.
    """
    nodes = _nodes(text)
    constants = _constants(nodes, _constants(nodes, {}))
    calls, notes = _calls(nodes)
    arguments: dict[str, Any] = {}
    for called, call in calls.items():
        if called in TASKS:
            arguments[TASK] = TASKS[called]
        arguments |= _arguments(called, call, constants)
        notes += _unread(called, call, constants)
    arguments |= _changed(nodes, calls)
    if isinstance(arguments.get("train_dataset"), Unresolved):
        loaded = [
            _literal(node, {}) for node in nodes if isinstance(node, ast.Call) and _name(node.func) == LOAD
        ]
        if loaded and all(each == loaded[0] for each in loaded):
            arguments["train_dataset"] = loaded[0]
    if TASK not in arguments and not any(name in text for name in TRAINERS):
        raise ValueError("it calls no GRPOConfig, GRPOTrainer, SFTConfig or SFTTrainer")
    return Input(arguments, (*notes, *([PARSER] if "TrlParser" in text else [])))


def function_names(value: Any) -> list[str]:
    """Return the names of one function or of several."""
    return [str(each) for each in (value if isinstance(value, list | tuple) else [value])]


def _nodes(text: str) -> list[ast.AST]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of the script's own strings
            return list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"it is not Python: {error}") from error


def _constants(nodes: Sequence[ast.AST], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of names that the script assigns once; others depend on what runs before.

    :param known: Values of names that a value may refer to.
    """
    assigned = Counter(
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )
    assigned.update(node.arg for node in nodes if isinstance(node, ast.arg))
    assigned.update(_name(node.value) for node in nodes if _changes(node))
    return {
        node.targets[0].id: _literal(node.value, known)
        for node in nodes
        if isinstance(node, ast.Assign) and len(node.targets) == 1
        if isinstance(node.targets[0], ast.Name) and assigned[node.targets[0].id] == 1
    }


def _changes(node: ast.AST) -> TypeGuard[ast.Subscript | ast.Attribute]:
    """Return whether a dict that has a name may become another one here."""
    if isinstance(node, ast.Subscript):
        return not isinstance(node.ctx, ast.Load)
    return isinstance(node, ast.Attribute) and node.attr in CHANGERS


def _calls(nodes: Sequence[ast.AST]) -> tuple[dict[str, ast.Call], list[str]]:
    """Return the first call of each name, all of one task, and notes on the others."""
    calls: dict[str, ast.Call] = {}
    notes = []
    wanted = [node for node in nodes if isinstance(node, ast.Call) and _name(node.func) in (*TASKS, PEFT)]
    for call in sorted(wanted, key=lambda call: (call.lineno, call.col_offset)):
        called = _name(call.func)
        tasks = {TASKS[name] for name in (*calls, called) if name in TASKS}
        if called in calls or (called in TASKS and len(tasks) > 1):
            notes.append(f"{called} in line {call.lineno} is not read: a config is of one run, the first")
        else:
            calls[called] = call
    return calls, notes


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _passed(called: str, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names and values of a call's arguments."""
    values = takewhile(lambda each: not isinstance(each, ast.Starred), call.args)
    yield from zip(POSITIONAL.get(called, ()), values, strict=False)
    yield from ((keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg is not None)


def _unpacked(call: ast.Call, constants: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of ``**`` of a call, where the script has the dict."""
    for keyword in call.keywords:
        values = None if keyword.arg else _literal(keyword.value, constants)
        if isinstance(values, dict):
            yield from ((name, value) for name, value in values.items() if isinstance(name, str))


def _arguments(called: str, call: ast.Call, constants: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of a call under the names that the table has for them."""
    if called == PEFT:
        yield "lora_r", LORA_RANK
    for passed, node in _passed(called, call):
        if passed == "args" and called in TRAINERS:
            continue
        name = LORA.get(passed, passed) if called == PEFT else passed
        if called == PEFT and not name.startswith("lora_"):
            continue
        value = _literal(node, constants)
        yield name, function_names(value) if name == "reward_funcs" else value
    if called != PEFT:
        yield from _unpacked(call, constants)


def _unread(called: str, call: ast.Call, constants: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes on the arguments that a call has, but not in its text."""
    place = f"{called} in line {call.lineno}"
    for keyword in call.keywords:
        is_read = called != PEFT and isinstance(_literal(keyword.value, constants), dict)
        if keyword.arg is None and not is_read:
            yield (
                f"{place}: arguments of **{_source(keyword.value)} are not known from the text; keys that "
                "they set have TRL's defaults here"
            )
    is_starred = any(isinstance(each, ast.Starred) for each in call.args)
    if is_starred or len(call.args) > len(POSITIONAL.get(called, ())):
        yield f"{place}: its positional arguments are not all read; name them"


def _changed(nodes: Sequence[ast.AST], calls: Mapping[str, ast.Call]) -> Iterator[tuple[str, Unresolved]]:
    """Yield the attributes of configs that the script assigns later, whose values depend on what runs."""
    configs = [
        value for name, call in calls.items() for passed, value in _passed(name, call) if passed == "args"
    ]
    for node in nodes:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and _name(node.value.func) in CONFIGS
        ):
            configs += node.targets
    names = {config.id for config in configs if isinstance(config, ast.Name)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _name(node.value) in names:
            yield node.attr, Unresolved(f"{_name(node.value)}.{node.attr} = ...")


def _literal(node: ast.AST, constants: Mapping[str, Any]) -> Any:
    """Return the value of a literal, of a name that has one, or the name of what is loaded."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        pass
    if isinstance(node, ast.Name):
        return constants.get(node.id, Unresolved(node.id))
    if isinstance(node, ast.Call) and _name(node.func) in (LOAD, "from_pretrained") and node.args:
        return _literal(node.args[0], constants)
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(each, constants) for each in node.elts]
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        pairs = zip(node.keys, node.values, strict=True)
        return {
            key.value: _literal(value, constants) for key, value in pairs if isinstance(key, ast.Constant)
        }
    if isinstance(node, ast.Call) and _name(node.func) == "dict" and not node.args:
        values = {each.arg: _literal(each.value, constants) for each in node.keywords}
        return Unresolved(_source(node)) if None in values else values
    return Unresolved(_name(node) or _source(node))


def _source(node: ast.AST) -> str:
    """Return the text of an expression in one line, shortened."""
    try:
        text = " ".join(ast.unparse(node).split())
    except (RecursionError, MemoryError):
        return type(node).__name__
    return text if len(text) <= LONGEST_SOURCE else f"{text[:LONGEST_SOURCE]}..."
