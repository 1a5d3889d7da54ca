"""Arguments of the Python API: as the layers of a config, before anything starts."""

from __future__ import annotations

import json
import logging
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pydantic import ValidationError

import anygauge
from anygauge import Config
from anygauge.api.call import Call, check_keywords
from anygauge.api.generation import _check_used
from anygauge.api.rewards import import_path
from anygauge.config import dump_config, load_config
from anygauge.observability.logs import driver_log
from anygauge.plugins import load_plugins
from anygauge_hooks.errors import AnygaugeError, CheckpointError, ConfigError, DataError, WorkerFailedError

ROWS = [{"prompt": "1+2=", "label": "3"}, {"prompt": "2+2=", "label": "4"}]


class Dataset:
    """A data set as the package ``datasets`` has it, as far as it is read: it iterates over rows."""

    column_names = ("prompt", "label")

    def __iter__(self) -> Iterator[dict[str, str]]:
        return iter(ROWS)


class Scalar:
    """A number of an array library."""

    shape = ()

    def item(self) -> int:
        return 7

    def tolist(self) -> int:
        return 7


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def tree(*arguments: Any, data: Any = None, reward: Any = None, eval_data: Any = None, **tables: Any) -> Any:
    source = arguments[0] if arguments else "m"
    call = Call.of(source, tables, data=data, reward=reward, eval_data=eval_data)
    call.start_as(resume=False, overwrite=False)
    base, above = call.layers()
    assert isinstance(base, dict)
    assert above == {}
    return base


# -------------------------------------------------------------------------
# Data
# -------------------------------------------------------------------------


@pytest.mark.parametrize("data", [ROWS, tuple(ROWS), iter(ROWS), Dataset(), pd.DataFrame(ROWS)])
def test_rows_are_written_to_the_run_directory(data: Any, tmp_path: Path) -> None:
    (file,) = tree(data=data)["data"]["train"]
    assert Path(file["path"]).parent == tmp_path / "runs" / "m-1" / "inputs"
    assert [json.loads(line) for line in Path(file["path"]).read_text().splitlines()] == ROWS
    assert file["name"] == "train"


@pytest.mark.parametrize("data", [[], iter(())])
def test_no_rows_are_said_to_be_none(data: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="train: the data has no rows"):
        tree(data=data)
    assert not list((tmp_path / "runs" / "m-1" / "inputs").iterdir())


def test_what_is_no_table_is_left_to_the_check_of_the_config() -> None:
    assert tree(run=5)["run"] == 5


@pytest.mark.parametrize("prompts", [5, None, {"prompt": "1+2="}, pd.DataFrame(ROWS)])
def test_prompts_that_are_no_list(prompts: Any) -> None:
    with pytest.raises(DataError, match=rf"The prompts are .*\b{type(prompts).__name__}\)?, not a list"):
        anygauge.generate("m", prompts)


@pytest.mark.parametrize("prompt", [5, None, {"prompt": "1 ="}])
def test_a_prompt_that_is_no_text(prompt: Any) -> None:
    with pytest.raises(DataError, match=f"Prompt 1 is {prompt} .*neither a string nor a list of messages"):
        anygauge.generate("m", ["1+1=", prompt])


def test_a_function_that_cannot_be_called_after_a_step_is_refused_before_the_first() -> None:
    with pytest.raises(ConfigError, match=r"on_step cannot be called(?s:.*)def on_step\(step, metrics\)"):
        anygauge.train("m", on_step=lambda step: None)  # type: ignore[arg-type,misc]
    with pytest.raises(ConfigError, match=r"before_step cannot be called(?s:.*)def before_step\(step\)"):
        anygauge.train("m", before_step=lambda: None)  # type: ignore[arg-type,misc]


class AsyncCallback:
    async def __call__(self, step: int, metrics: Any) -> None: ...


def test_an_async_function_is_no_callback() -> None:
    """Its coroutine is true, which would end the run."""
    with pytest.raises(ConfigError, match=r"on_step cannot be called .*: it is an async function"):
        anygauge.train("m", on_step=AsyncCallback().__call__)
    with pytest.raises(ConfigError, match=r"on_step cannot be called .*: it is an async function"):
        anygauge.train("m", on_step=AsyncCallback())


def test_what_is_no_metric_function_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"metrics is 3 \(int\)(?s:.*)def metrics\(groups\)"):
        anygauge.train("m", metrics=[3])


def test_an_error_has_no_frame_of_anygauge(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(error: type[BaseException] = ZeroDivisionError) -> Iterator[dict[str, str]]:
        yield ROWS[0]
        raise error

    with pytest.raises(DataError) as caught:
        anygauge.generate("m", None)  # type: ignore[arg-type]
    assert len(caught.traceback) == 1
    assert caught.value.__cause__ is None
    with pytest.raises(ConfigError) as evaluated:
        anygauge.evaluate("m", checkpoints="runs/first")
    assert len(evaluated.traceback) == 1
    with pytest.raises(ZeroDivisionError) as theirs:
        anygauge.train("m", rows())
    assert [each.name for each in theirs.traceback[1:]] == ["rows"]
    with pytest.raises(KeyboardInterrupt) as interrupted:
        anygauge.train("m", rows(KeyboardInterrupt))
    assert len(interrupted.traceback) == 1
    with monkeypatch.context() as patch:
        patch.setattr("anygauge.config.load.validate", lambda tree: 1 / 0)
        with pytest.raises(ZeroDivisionError) as internal:
            anygauge.train("m", "t.jsonl", "math")
    assert len(internal.traceback) > 3, "nothing that the caller wrote"
    monkeypatch.setenv("ANYGAUGE_DEBUG", "1")
    with pytest.raises(ConfigError) as whole:
        anygauge.train("m", on_step=lambda step: None)  # type: ignore[arg-type,misc]
    assert len(whole.traceback) > 1
    assert isinstance(whole.value.__cause__, TypeError)


def test_an_error_that_a_worker_raised_on_purpose_comes_as_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = WorkerFailedError("Rank 0 (actor) raised:\nTraceback ...")

    def raising(*_: Any, **__: Any) -> Any:
        raise failure

    monkeypatch.setattr("anygauge.api.evaluation.load_evaluation", raising)
    with pytest.raises(WorkerFailedError, match="Traceback"):
        anygauge.evaluate("m", ROWS, "math")
    failure.__cause__ = CheckpointError("It is of another model.", hint="Take that one.")
    with pytest.raises(CheckpointError, match=r"^Rank 0 \(actor\): It is (?s:.*)Take that one") as caught:
        anygauge.evaluate("m", ROWS, "math")
    assert len(caught.traceback) == 1
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    monkeypatch.setenv("ANYGAUGE_DEBUG", "1")
    with pytest.raises(WorkerFailedError):
        anygauge.evaluate("m", ROWS, "math")


def test_warnings_of_a_run_are_on_the_terminal_unless_the_program_logs_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def loading(*_: Any, **__: Any) -> Any:
        with driver_log(tmp_path, backend="cpu"):
            for name in ("anygauge.health", "anygauge_cuda"):
                logging.getLogger(name).warning("of %s\x1b[2K", name)
        raise ConfigError("seen", hint="")

    def shown(*handlers: logging.Handler) -> str:
        root = logging.getLogger()
        with monkeypatch.context() as patch:
            patch.setattr(root, "handlers", list(handlers))
            with pytest.raises(ConfigError, match="seen"):
                anygauge.generate("m", ["a"])
            assert root.handlers == list(handlers)
        return capsys.readouterr().err

    monkeypatch.setattr("anygauge.api.generation.load_evaluation", loading)
    assert shown() == "WARNING: of anygauge.health\\x1b[2K\nWARNING: of anygauge_cuda\\x1b[2K\n"
    assert shown(logging.NullHandler()) == ""
    monkeypatch.setattr(logging.getLogger("anygauge"), "handlers", [logging.NullHandler()])
    assert shown() == ""


def test_a_keyword_that_is_like_an_argument_is_refused_with_its_name() -> None:
    with pytest.raises(
        ConfigError, match=r"generate\(\) has no argument 'max_tokens'; did you mean max_new_to"
    ):
        anygauge.generate("model", ["1+2="], max_tokens=4)
    with pytest.raises(ConfigError, match=r"train\(\) has no argument 'on_steps'; did you mean on_step\?"):
        anygauge.train("model", on_steps=print)
    with pytest.raises(ConfigError, match=r"evaluate\(\) has no argument 'checkpoints'; did you mean checkp"):
        anygauge.evaluate("model", checkpoints="runs/first")
    for name in ("train", "train.lr", "steps", "reward_funcs", "learning_rate"):
        check_keywords(anygauge.train, {name: 1})


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"n": 3}, r"does not use n\.(?s:.*)samples_per_prompt=4"),
        ({"num_return_sequences": 3}, r"(?s)does not use num_return_seq.*samples_per_prompt=4"),
        ({"max_completion_length": 3}, "(?s)does not use max_completion_length.*max_new_tokens=64"),
        ({"top_p": 0.9}, r'(?s)does not use top_p.*eval=\{"top_p": 0.9\}'),
        (
            {"rollout": {"samples_per_prompt": 3}},
            r"(?s)use rollout\.samples_per_prompt.*samples_per_prompt=4",
        ),
        ({"eval.samples_per_prompt": 3}, r"(?s)use eval\.samples_per_prompt.*samples_per_prompt=4"),
        ({"rollout.temperature": 0}, r"(?s)use rollout\.temperature.*Write temperature=0\.5"),
        ({"eval": {"datasets": {"far": {"files": ["b"]}}}}, "(?s)use eval.datasets.far.files.*as prompts"),
        ({"data": ROWS}, "(?s)use data.*as prompts"),
        ({"data": {"input_key": "q"}}, r"(?s)use data\.input_key.*no further columns"),
        ({"reward": len}, "(?s)use reward.*not scored"),
        ({"temperature": 0, "eval": {"temperature": 1}}, r"both temperature and eval\.temperature"),
        ({"max_new_tokens": 4, "rollout.max_new_tokens": 8}, r"both max_new_tokens and rollout\.max_new"),
        ({"seed": 0, "run": {"seed": 1}}, r"both seed and run\.seed"),
    ],
)
def test_a_key_that_generation_would_ignore_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        anygauge.generate("model", ["1+2="], **settings)


def test_keys_that_decide_how_a_model_answers_are_taken() -> None:
    _check_used(
        {"rollout": {"max_new_tokens": 4, "stop": ["."]}, "eval.top_p": 0.9, "data": {}, "train.dtype": "x"},
        {"max_new_tokens": None, "temperature": 0.5, "seed": None},
    )


def test_a_wrong_config_object_is_the_error_of_a_file() -> None:
    with pytest.raises(ConfigError, match=r"run\.nam: found 'x'; unknown key; did you mean run\.name"):
        Config(run={"nam": "x"}, model="model", data={"train": ["rows.jsonl"]})  # type: ignore[arg-type]
    tree = {"run": {"name": "x", "steps": "5"}, "model": "model", "data": {"train": ["rows.jsonl"]}}
    with pytest.raises(ValidationError, match="steps"):  # a string is no number there
        Config.model_validate_json(json.dumps(tree), strict=True)


def test_an_object_that_is_no_model_is_not_printed() -> None:
    class Model:
        def __repr__(self) -> str:
            return "Model(\n  (layers): ...\n)"

    with pytest.raises(ConfigError, match=r"^The source is an object of type Model, neither a model"):
        tree(Model())


def test_the_same_rows_have_the_same_file_so_that_a_run_can_be_resumed() -> None:
    paths = [
        tree(data=rows, run={"name": "r"})["data"]["train"][0]["path"] for rows in (ROWS, ROWS, ROWS[:1])
    ]
    assert paths[0] == paths[1] != paths[2]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("a.jsonl", ["a.jsonl"]),
        (Path("a.jsonl"), ["a.jsonl"]),
        (["a.jsonl", Path("b.parquet")], ["a.jsonl", "b.parquet"]),
        ({"train": ["a.jsonl"]}, ["a.jsonl"]),
        ({"train": [{"path": "a.jsonl", "wieght": 1}]}, [{"path": "a.jsonl", "wieght": 1}]),
        ({"train": [{"name": "a"}]}, [{"name": "a"}]),
    ],
)
def test_paths_stay_paths(data: Any, expected: list[Any]) -> None:
    assert tree(data=data)["data"]["train"] == expected


def test_evaluation_data_may_have_names() -> None:
    data = tree(data="t.jsonl", eval_data={"easy": ROWS, "hard": "hard.jsonl"})["eval"]["data"]
    assert [each["name"] for each in data] == ["easy", "hard"]
    assert Path(data[0]["path"]).name.startswith("easy-")
    assert data[1]["path"] == "hard.jsonl"


def test_what_the_rows_have_decides_what_nobody_set() -> None:
    chat = [{"prompt": [{"role": "user", "content": "1+2"}], "answer": Scalar()}]
    data = tree(data=chat)["data"]
    assert (data["label_key"], data["apply_chat_template"]) == ("none", True)
    assert "label_key" not in tree(data=ROWS)["data"]
    assert tree(data=chat, **{"data.label_key": "answer"})["data"]["label_key"] == "answer"


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ([{"prompt": object()}], "row 0 cannot be written as JSON"),
        ([{"prompt": float("nan")}], "row 0 cannot be written as JSON"),
        ([*ROWS, ["1+2="]], "row 2 is list, not a dict"),
        ({"train": Dataset(), "test": Dataset()}, r"dict of splits: 'train', 'test'(?s:.*)data\['train'\]"),
        ({"train": ROWS}, "dict of splits: 'train'"),
        ({"train": pd.DataFrame(ROWS)}, "dict of splits: 'train'"),
        ({"train": iter(ROWS)}, "dict of splits: 'train'"),
        (7, "The data is int, which has no rows"),
    ],
)
def test_data_that_cannot_be_used_is_refused(data: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=problem):
        tree(data=data)
    assert not list(tmp_path.glob("runs/*/inputs/*"))


# -------------------------------------------------------------------------
# Rewards
# -------------------------------------------------------------------------


def test_a_function_of_a_module_has_its_path() -> None:
    assert import_path(json.dumps) == "json:dumps"
    assert tree(reward=json.dumps)["reward"] == {"function": "json:dumps"}


def test_a_function_of_a_script_or_a_cell_has_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has another ``__main__``."""

    def of_main(response: str) -> float:
        return 0.0

    of_main.__module__, of_main.__qualname__ = "__main__", "of_main"
    monkeypatch.setattr(sys.modules["__main__"], "of_main", of_main, raising=False)
    assert import_path(of_main) is None


def test_a_function_without_a_path_stays_in_this_process() -> None:
    def sevens(response: str) -> float:
        return 1.0

    call = Call.of("m", {}, reward=[sevens, (lambda response: 0.0, 0.5), "math"])
    parts = call.get("reward", "parts")
    assert {name: table["function"] for name, table in parts.items()} == {
        "sevens": "python.sevens",
        "lambda": "python.lambda",
        "math": "math",
    }
    assert parts["lambda"]["weight"] == 0.5
    functions = {each.name: each for each in call.functions.register_reward_functions()}
    assert functions["python.sevens"].fn(response="7") == 1.0
    assert functions["python.sevens"].inline


def test_two_functions_of_one_name_keep_theirs() -> None:
    reward = [lambda response: 0.0, lambda response: 1.0]
    parts = tree(reward=reward)["reward"]["parts"]
    assert {table["function"] for table in parts.values()} == {"python.lambda", "python.lambda-2"}


def test_one_reward_in_a_list_is_that_reward() -> None:
    assert tree(reward=["math"])["reward"] == {"function": "math"}


def test_a_table_of_a_reward_may_hold_a_function() -> None:
    table = tree(reward={"function": lambda response: 0.0, "timeout_s": 3})["reward"]
    assert table == {"function": "python.lambda", "timeout_s": 3}


@pytest.mark.parametrize("reward", [3, [3], [("math", "0.5")]])
def test_what_is_no_reward_is_refused(reward: Any) -> None:
    with pytest.raises(ConfigError, match="which is no reward"):
        tree(reward=reward)


def test_only_a_reward_may_be_a_lambda() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.advantage is .*other processes cannot import"):
        tree(algorithm={"advantage": lambda rewards: rewards})
    assert tree(algorithm={"advantage": json.dumps})["algorithm"]["advantage"] == "json:dumps"


# -------------------------------------------------------------------------
# Layers
# -------------------------------------------------------------------------


def test_tables_and_dotted_names_are_one_tree() -> None:
    above = tree(
        train={"lr": 1e-5, "parallel": {"tensor": 2}}, **{"train.dtype": "float32", "run.steps": Scalar()}
    )
    assert above["train"] == {"lr": 1e-5, "parallel": {"tensor": 2}, "dtype": "float32"}
    assert above["run"]["steps"] == 7
    assert above["placement"] == {"launcher": "local"}


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        (
            {"rollout": {"max_new_tokens": 4}, "rollout.max_new_tokens": 8},
            r"rollout\.max_new_tokens is given twice",
        ),
        ({"train": 1e-5, "train.lr": 1e-3}, r"train and train\.lr are both given(?s:.*)train=\{\.\.\.\}"),
        ({"train.lr": 1e-3, "train": 1e-5}, r"train\.lr and train are both given(?s:.*)train=\{\.\.\.\}"),
        ({"reward": "math", "reward.function": "exact_match"}, r"reward\.function is given twice"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(tables: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        tree(**tables)
    assert tree(**{"train": {}, "train.lr": 1e-3, "train.parallel": {}})["train"]["lr"] == 1e-3


def test_the_first_argument_is_a_model_a_tree_or_a_config() -> None:
    assert tree("org/name")["model"] == {"path": "org/name"}
    assert tree(None, model=Path("dir"))["model"] == {"path": "dir"}
    assert tree({"model": "dir", "train.lr": 1e-3})["train"] == {"lr": 1e-3}
    config = Config.model_validate({"run": {"name": "c"}, "model": "dir", "data": {"train": ["a"]}})
    assert tree(config, train={"lr": 1e-3})["run"] == {"name": "c"}
    with pytest.raises(ConfigError, match="neither a model nor a config"):
        tree(7)


def test_a_new_run_has_the_next_free_name(tmp_path: Path) -> None:
    assert tree("org/My model")["run"]["name"] == "My-model-1"
    assert tree("runs/tiny-7/hf")["run"]["name"] == tree("runs/tiny-7/hf-step-3")["run"]["name"] == "tiny-1"
    (tmp_path / "elsewhere" / "m-1").mkdir(parents=True)
    assert tree(run={"directory": "elsewhere"})["run"]["name"] == "m-2"


@pytest.mark.parametrize("option", ["resume", "overwrite"])
def test_an_earlier_run_must_be_named(option: str) -> None:
    call = Call.of("m", {})
    with pytest.raises(ConfigError, match=f"{option}=True needs the name"):
        call.start_as(**{"resume": False, "overwrite": False, option: True})


FILE = """
[model]
path = "m"
[data]
train = ["t.jsonl"]
[reward]
function = "exact_match"
"""


@pytest.mark.parametrize(
    ("overrides", "problems"),
    [
        ({"train": {"lrr": 1}}, ["train.lrr: found 1 in the call; unknown key; did you mean train.lr?"]),
        ({"train.lr": "fast"}, ["train.lr: found 'fast' in the call; must be a valid number"]),
        ({"lr": 1e-3}, ["lr: found 0.001 in the call; unknown key; did you mean train.lr or critic.lr?"]),
        (
            {"reward_funcs": [lambda response: 0.0]},
            [
                "reward_funcs: found ['lambda'] in the call; unknown key; "
                "write reward.function (docs/migrate/trl.md)"
            ],
        ),
        (
            {"callbacks": [json.dumps]},
            [
                "callbacks: found ['json:dumps'] in the call; unknown key; `anygauge.train(..., "
                "before_step=..., on_step=...)` takes functions of a step (docs/python.md)"
            ],
        ),
        ({"rows": ["1+2="]}, ["rows: found ['1+2='] in the call; unknown key; did you mean data.train?"]),
    ],
)
def test_a_wrong_override_is_the_error_of_the_command_line(
    overrides: dict[str, Any], problems: list[str], tmp_path: Path
) -> None:
    (tmp_path / "f.toml").write_text(FILE)
    call = Call.of("f.toml", overrides)
    with pytest.raises(AnygaugeError) as caught:
        load_config(*call.layers(), backend="cpu", plugins=load_plugins(only=["cpu"]), check_files=False)
    assert caught.value.code == "AG201"
    assert str(caught.value.args[0]).splitlines() == [
        f"f.toml has {len(problems)} problem:",
        *(f"  {each}" for each in problems),
    ]


def test_an_error_without_a_file_names_the_key_alone() -> None:
    base = tree(data="t.jsonl", reward="exact_match", train={"lrr": 1})
    with pytest.raises(ConfigError, match=r"The config has 1 problem:\n  train\.lrr: found 1; unknown key"):
        load_config(base, {}, backend="cpu", plugins=load_plugins(only=["cpu"]), check_files=False)


def test_a_file_gives_the_name_and_what_the_call_leaves_out(tmp_path: Path) -> None:
    (tmp_path / "f.toml").write_text(FILE)
    call = Call.of(tmp_path / "f.toml", {"train": {"lr": 1e-3}}, data=ROWS)
    call.start_as(resume=True, overwrite=False)
    loaded = load_config(*call.layers(), backend="cpu", plugins=load_plugins(only=["cpu"]), check_files=False)
    config = loaded.config
    assert (config.run.name, config.run.resume, config.train.lr) == ("f", True, 1e-3)
    assert config.placement.launcher == "ray"
    assert Path(config.data.train[0].path).parent == tmp_path / "runs" / "f" / "inputs"


BASE = """
[run]
name = "r"
[model]
path = "m"
[data]
train = ["a.jsonl"]
[reward.parts.format]
function = "exact_match"
[eval.datasets.far]
files = ["b.jsonl"]
"""


@pytest.mark.parametrize("is_file", [True, False])
def test_rewards_and_evaluation_data_replace_those_of_a_config(tmp_path: Path, is_file: bool) -> None:
    (tmp_path / "base.toml").write_text(BASE)
    source: Any = str(tmp_path / "base.toml") if is_file else tomllib.loads(BASE)
    made = tree(source, reward="math", eval_data="c.jsonl")
    assert made["reward"] == {"function": "math"}
    assert made["eval"] == {"data": [{"path": "c.jsonl"}]}
    kept = Call.of(source, {})
    assert kept.get("reward", "parts") == {"format": {"function": "exact_match"}}
    assert set(kept.get("eval", "datasets")) == {"far"}


def test_a_config_object_reads_what_a_file_has() -> None:
    config = Config.model_validate(tree(data="a.jsonl"))
    again = Config(**tomllib.loads(dump_config(config)))
    assert again == config
    assert Config(**tree(data="a.jsonl"), train={"dtype": "bf16"}).train.dtype == "bfloat16"


def test_a_config_object_has_the_defaults_of_python() -> None:
    tables = tree(data="a.jsonl")
    del tables["placement"]
    assert tree(Config.model_validate(tables))["placement"] == {"launcher": "local"}


def test_generation_answers_every_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a config says of its own rows."""
    seen: list[Any] = []

    def loading(base: Any, overrides: Any, **_: Any) -> Any:
        seen.append(base)
        raise ConfigError("seen", hint="")

    monkeypatch.setattr("anygauge.api.generation.load_evaluation", loading)
    limits = {"max_prompts": 1, "max_new_tokens": 9, "datasets": {"far": {"files": ["b.jsonl"]}}}
    config = {
        "model": {"path": "m"},
        "data": {"input_key": "question", "max_prompt_tokens": 3},
        "eval": limits,
    }
    with pytest.raises(ConfigError, match="seen"):
        anygauge.generate(config, ["a", "b"], max_new_tokens=np.int64(4))
    (made,) = seen
    assert (made["data"]["input_key"], made["data"]["max_prompt_tokens"]) == ("prompt", "none")
    assert {key: made["eval"][key] for key in ("max_prompts", "max_new_tokens")} == {
        "max_prompts": "none",
        "max_new_tokens": 4,
    }
    assert "datasets" not in made["eval"]
    assert type(made["eval"]["max_new_tokens"]) is int
