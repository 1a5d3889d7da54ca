"""Loading: layers, unknown keys, all problems at once. Covers check_config."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anygauge.config import Config, LoadedConfig, dump_config, load_config, write_resolved
from anygauge.data.evaluation import eval_datasets
from anygauge.plugins import Plugins
from anygauge_hooks import hookimpl
from anygauge_hooks.errors import ConfigError, UnknownBackendError
from anygauge_hooks.types import Availability, BackendSpec, ConfigProblem

Load = Callable[..., LoadedConfig]


@pytest.mark.parametrize(("number", "last"), [(20, "key19: found 0"), (23, "and 3 more")])
def test_no_more_than_twenty_problems_are_printed(load: Load, number: int, last: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({"train": "\n".join(f"key{index} = 0" for index in range(number))})
    first, *lines = str(caught.value.args[0]).splitlines()
    assert first.endswith(f"has {number} problems:")
    assert len(lines) == min(number, 21)
    assert last in lines[-1]


def test_precedence_is_defaults_file_backend_command_line(load: Load) -> None:
    tables = {"train": "lr = 1e-3\nwarmup_steps = 7", "on.cpu.train": "lr = 2e-3\nweight_decay = 0.1"}
    train = load(tables).config.train
    assert (train.lr, train.warmup_steps, train.weight_decay, train.optimizer_steps) == (2e-3, 7, 0.1, 1)
    assert load(tables, ["--train.lr", "3e-3"]).config.train.lr == 3e-3
    assert load(tables, backend="fast").config.train.lr == 1e-3


def test_user_keys_are_what_the_user_wrote_anywhere(load: Load) -> None:
    tables = {
        "train": "lr = 1e-3",
        "on.cpu.train.megatron": "num_layers = 2",
        "on.fast.train": "min_lr = 0.0",
    }
    keys = load(tables, ["--run.seed=5"]).user_keys
    assert {"train.lr", "train.megatron.num_layers", "run.seed", "run.name"} <= keys
    assert "train.min_lr" not in keys
    assert "train.weight_decay" not in keys


@pytest.mark.parametrize(
    ("overrides", "path", "value"),
    [
        (["--train.lr", "1e-4"], "train.lr", 1e-4),
        (["--train.lr=1"], "train.lr", 1.0),
        (["train.lr=0.5"], "train.lr", 0.5),
        ([("train.lr", 0.25)], "train.lr", 0.25),
        (["--train.megatron.shift", "-3"], "train.megatron", {"shift": -3}),
        (["--run.overwrite", "true"], "run.overwrite", True),
        (["--run.name", "bare-string"], "run.name", "bare-string"),
        (["--run.name", "2026-01-02"], "run.name", "2026-01-02"),
        (["--run.name", '"7"'], "run.name", "7"),
        (["--data.system_prompt=a = b", "--data.apply_chat_template=true"], "data.system_prompt", "a = b"),
        (["--rollout.stop", '["a", "b"]'], "rollout.stop", ("a", "b")),
        (["--rollout.stop", "[]"], "rollout.stop", ()),
        (["--data.label_key", "none", "--reward.function", "json:loads"], "data.label_key", None),
        (["--train.recompute", "none"], "train.recompute", "none"),
        (["--train.megatron.num_layers", "2"], "train.megatron", {"num_layers": 2}),
    ],
)
def test_override_values(
    load: Load, overrides: list[str | tuple[str, Any]], path: str, value: object
) -> None:
    section, key = path.split(".")
    assert getattr(getattr(load({}, overrides, check_files=False).config, section), key) == value


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["--train.lr"], "train.lr: not set on the command line; needs a value: --train.lr VALUE"),
        (["--train.lr", "--run.seed", "1"], "train.lr: not set on the command line; needs a value"),
        (["--rollout.stop", "[a,b]"], "rollout.stop: found '[a,b]' on the command line; not valid TOML"),
        (["--run.seed", "-1"], "run.seed: found -1 on the command line; must be greater than or equal to 0"),
        (["--run.seed", str(2**63)], f"must be less than {2**63}"),
        (["--rollout.stop", "[7]"], "rollout.stop[0]: found 7 on the command line; must be a valid string"),
        (["--run.name", "7"], "write it in quotes: '\"7\"' on the command line"),
        (
            ["--rollout.stop", "a"],
            "rollout.stop: found 'a' on the command line; must be a valid array: [\"a\"]",
        ),
        (["--on.fast.train.lr", "1"], "write --train.lr 1"),
        (["--train.lr", "inf"], "train.lr: found inf on the command line; must be a finite number"),
    ],
)
def test_bad_override(load: Load, overrides: list[str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({}, overrides)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        ({"train": "lrr = 1"}, "train.lrr: found 1; unknown key; did you mean train.lr?"),
        ({"algorithm": "lr = 1"}, "algorithm.lr: found 1; unknown key; did you mean train.lr or critic.lr?"),
        (
            {"algorithm": 'name = "grpo"'},
            "algorithm.name: found 'grpo'; unknown key; did you mean algorithm.adv",
        ),
        ({"model": 'name = "m"'}, "model.name: found 'm'; unknown key; did you mean model.path?"),
        ({"train": 'dtype = "fp8"'}, "`anygauge convert --to-bfloat16 DIR OUT` writes a checkpoint in FP8"),
        ({"train": 'dtype = "fp16"'}, 'or "none"; float16 is not supported, and bfloat16 has the same size'),
        ({"train": 'adam_betas = "0.9, 0.99"'}, "must be a valid array: [0.9, 0.99]"),
        ({"checkpoint": "every = 3"}, "checkpoint: found {'every': 3}; unknown key; did you mean save?"),
        ({"trian": ""}, "trian: found {}; unknown key; did you mean train?"),
        ({"train": "lerning_rate = 1"}, "train.lerning_rate: found 1; unknown key; did you mean train.lr?"),
        ({"train": "batch_size = 1"}, "unknown key; did you mean train.global_batch_size?"),
        ({"train": "qqq = 1"}, "train.qqq: found 1; unknown key; known here: engine, dtype"),
        ({"run": "steps = 1.5"}, "run.steps: found 1.5; must be a valid integer"),
        ({"run": 'steps = "5"'}, "run.steps: found '5'; must be a valid integer"),
        ({"run": "overwrite = 1"}, "run.overwrite: found 1; must be true or false"),
        ({"rollout": 'stop = [""]'}, "rollout.stop[0]: found ''; must have at least 1 character"),
        ({"rollout": "stop_token_ids = [-1]"}, "rollout.stop_token_ids[0]: found -1; must be greater than"),
        ({"train": "adam_betas = [0.9]"}, "train.adam_betas: found [0.9]; must be two numbers"),
        ({"train": "adam_betas = [0.9, 0.9, 0.9]"}, "found [0.9, 0.9, 0.9]; must be two numbers"),
        ({"data": "system_prompt = 3"}, 'must be a valid string; write it in quotes: "3", or "none"'),
        ({"on.fastt.train": "lrr = 1"}, "did you mean [on.fast]?"),
        ({"on.fastt.train": "lrr = 1"}, "train.lrr: found 1 in [on.fastt]; unknown key"),
        ({"train": 'dtype = "fp8"'}, "must be 'float32' or 'bfloat16', or \"none\""),
        ({"train": 'dtype = "float8"'}, "writes a checkpoint in FP8 as bfloat16\n"),
        (
            {"health": 'logprob_abs_diff_error = "off"'},
            "health.logprob_abs_diff_error: found 'off'; must be a valid number or 'auto', or \"none\"\n",
        ),
        (
            {"health": "logprob_abs_diff_error = 0"},
            "health.logprob_abs_diff_error: found 0; must be greater than 0 or 'auto', or \"none\"\n",
        ),
        ({"on.fast.train": "lr = -1"}, "train.lr: found -1 in [on.fast]; must be greater than 0"),
        ({"on.cpu.train": "lr = -1"}, "train.lr: found -1 in [on.cpu]; must be greater than 0"),
        ({"on.elsewhere.train": "lrr = 1"}, "train.lrr: found 1 in [on.elsewhere]; unknown key"),
        ({"on": "cpu = 3"}, "on.cpu: found 3; must be a table named after a backend"),
        ({"on.CPU": ""}, "on.CPU: found {}; must be a table named after a backend"),
        ({"on.cpu": "train = 3"}, "train: found 3 in [on.cpu]; must be a table"),
    ],
)
def test_schema_problem(load: Load, tables: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tables)
    assert text in str(caught.value)


def test_a_table_for_a_backend_that_is_not_installed_is_checked_and_otherwise_left_alone(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    assert load({"on.elsewhere.train": "lr = 0.5"}).config.train.lr == 1e-6
    assert re.search(
        r"\[on.elsewhere\] is for a backend that is not installed; known: (\w+, )*fast\b", caplog.text
    )


def test_a_table_named_after_an_alias_says_the_backend(load: Load, plugins: Plugins) -> None:
    plugins.register(Aliased(), "aliased")
    with pytest.raises(ConfigError, match=r"on\.quick: found .*; did you mean \[on\.fastest\]\?"):
        load({"on.quick.train": "lr = 0.5"})


def test_a_warm_up_that_the_run_does_not_finish_is_a_warning(
    load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    load({"train": "warmup_steps = 100"})
    assert not caplog.messages
    load({"train": "warmup_steps = 101"})
    (warning,) = caplog.messages
    assert "train.warmup_steps: found 101; the run takes 100 optimizer steps and ends before" in warning


class Aliased:
    """A backend with another name."""

    @hookimpl
    def register_backends(self) -> list[BackendSpec]:
        return [
            BackendSpec(
                name="fastest",
                aliases=("quick",),
                device_type="fastest",
                dist_backend="gloo",
                probe=lambda: Availability(ok=False),
                scheduler_resource="GPU",
                local_device=lambda ids, env: 0,
            )
        ]


def test_all_problems_come_in_one_error(load: Load, plugins: Plugins) -> None:
    class Strict:
        @hookimpl
        def check_config(self, config: Config, backend: BackendSpec) -> list[ConfigProblem]:
            return [ConfigProblem(path="train.megatron", found={}, hint=f"no good on {backend.name}")]

    plugins.register(Strict(), "strict")
    tables = {
        "run": "steps = 0",
        "train": 'engine = "warp"\noptimizer_steps = 3',
        "on.fast.eval": "interval = 0",
        "rollout": "nope = 1",
    }
    with pytest.raises(ConfigError) as caught:
        load(tables, ["--algorithm.clip_low", "2"])
    text = str(caught.value)
    assert "c.toml has 7 problems:" in text
    for path in (
        "run.steps",
        "train.engine",
        "train.optimizer_steps",
        "eval.interval",
        "rollout.nope",
        "algorithm.clip_low",
        "train.megatron",
    ):
        assert f"\n  {path}: found " in text
    assert text.endswith("[AG201]")


def test_a_missing_table_and_a_missing_key_say_what_goes_there(tmp_path: Path, plugins: Plugins) -> None:
    path = tmp_path / "no name.toml"
    path.write_text("[model]\n[data]\ntrain = []")
    with pytest.raises(ConfigError) as caught:
        load_config(path, backend="cpu", plugins=plugins)
    text = str(caught.value)
    assert "run: not set; required table; it needs name" in text
    assert "reward.function: not set" in text
    assert "model.path: not set; required: Hugging Face directory" in text
    assert "data.train: found []; name at least one file" in text


def test_hints_are_plain_text(tmp_path: Path, plugins: Plugins) -> None:
    path = tmp_path / "c.toml"
    path.write_text("[model]")
    with pytest.raises(ConfigError, match="or a name on the hub: Qwen/Qwen3") as caught:
        load_config(path, backend="cpu", plugins=plugins)
    assert "``" not in str(caught.value)


def test_a_byte_order_mark_is_no_key(load: Load, tmp_path: Path, plugins: Plugins) -> None:
    path = tmp_path / "bom.toml"
    expected = load()
    path.write_bytes(b"\xef\xbb\xbf" + (tmp_path / "c.toml").read_bytes())
    assert load_config(path, backend="cpu", plugins=plugins).config == expected.config


@pytest.mark.parametrize(
    ("content", "text"),
    [(b"[run\n", "is not valid TOML: .*line 1"), (b"\xff", "is not UTF-8"), (None, "No such file")],
)
def test_unreadable_file(tmp_path: Path, plugins: Plugins, content: bytes | None, text: str) -> None:
    path = tmp_path / "c.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=text):
        load_config(path, backend="cpu", plugins=plugins)


def test_a_backend_that_cannot_run_here_is_resolved(load: Load) -> None:
    assert load(backend="fast").backend.name == "fast"


def test_an_unknown_backend_is_refused(load: Load) -> None:
    with pytest.raises(UnknownBackendError, match="installed: cpu, fast"):
        load(backend="slow")


def test_the_resolved_config_loads_back_to_the_same(load: Load, tmp_path: Path, plugins: Plugins) -> None:
    overrides = [
        "--data.label_key=none",
        "--reward.function=json:loads",
        "--train.megatron.moe={ a = [1, 2.5], b = { c = true } }",
        '--data.system_prompt="a\\n\\"b\\" = [c]"',
        "--data.apply_chat_template=true",
    ]
    loaded = load({"on.cpu.train": "lr = 1e-10"}, overrides, check_files=False)
    write_resolved(loaded.config, tmp_path / "resolved.toml")
    again = load_config(tmp_path / "resolved.toml", backend="fast", plugins=plugins, check_files=False)
    assert again.config == loaded.config
    assert dump_config(again.config) == dump_config(loaded.config)
    assert "[on." not in dump_config(loaded.config)


EVERYWHERE = {
    "reward": 'key = "none"\noptions = { strip = "none" }',
    "eval.datasets.e": """
files = ["e.jsonl", { path = "f.jsonl", name = "none" }]
label_key = "none"
max_prompts = "none"
stop = ["none"]
reward.parts.a = { function = "json:loads", key = "none", extract = "none" }""",
    "eval.datasets.f": 'files = ["f.jsonl"]',
}


def test_none_is_null_at_any_depth(load: Load) -> None:
    config = load(EVERYWHERE, check_files=False).config
    found = config.eval.datasets["e"]
    assert found.reward is not None
    part = found.reward.parts["a"]
    assert (part.key, part.extract, config.reward.options) == (None, "none", {"strip": "none"})
    assert (found.label_key, found.max_prompts, found.stop) == (None, None, ("none",))
    assert [file.name for file in found.files] == [None, None]
    filled = eval_datasets(config)
    assert (filled["e"].label_key, filled["f"].label_key) == (None, "label")


def test_what_a_data_set_leaves_out_is_left_out_in_the_resolved_config(
    load: Load, tmp_path: Path, plugins: Plugins
) -> None:
    config = load(EVERYWHERE, ["--eval.max_prompts=5"], check_files=False).config
    text = dump_config(config)
    (tmp_path / "resolved.toml").write_text(text)
    again = load_config(tmp_path / "resolved.toml", backend="cpu", plugins=plugins, check_files=False).config
    assert (again, eval_datasets(again), dump_config(again)) == (config, eval_datasets(config), text)
    assert [each.max_prompts for each in eval_datasets(again).values()] == [None, 5]


@pytest.mark.parametrize(
    ("own", "text"),
    [
        ("stopp = []", "eval.datasets.e.stopp: found []; unknown key; did you mean eval.datasets.e.stop"),
        (
            "metadata_key = 3",
            'e.metadata_key: found 3; must be a valid string; write it in quotes: "3", or "none"',
        ),
        (
            "reward.parts.a.weight = 1.0",
            "eval.datasets.e.reward.parts.a.function: not set; required: A registered",
        ),
        ('reward = { function = "exact_match", keyy = "a" }', "did you mean eval.datasets.e.reward.key?"),
    ],
)
def test_a_problem_below_a_section_is_explained(load: Load, own: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({"eval.datasets.e": f'files = ["e.jsonl"]\n{own}'}, check_files=False)
    assert text in str(caught.value)


def test_relative_paths_start_at_the_current_directory(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "here.jsonl").write_text("")
    monkeypatch.chdir(elsewhere)
    (file,) = load({}, ['--data.train=["here.jsonl"]']).config.data.train
    assert file.path == "here.jsonl"
    with pytest.raises(ConfigError, match=r"data.train\[0\].*relative paths start at the current directory"):
        load({}, ['--data.train=["train.jsonl"]'])


LINES = """model.path = "model"
data.train = ["train.jsonl"]
reward.function = "exact_match"
train.lr = 1e-6
"""


@pytest.mark.parametrize(
    ("file", "added", "overrides", "name"),
    [
        ("first.toml", "", [], "first"),
        ("v1.2.toml", "run.steps = 3", [], "v1.2"),
        ("first.toml", 'run.name = "second"', [], "second"),
        ("first.toml", 'on.cpu.run.name = "third"', [], "third"),
        ("first.toml", "", ["--run.name=fourth"], "fourth"),
    ],
)
def test_four_lines_are_a_config_and_its_file_names_the_run(
    file: str, added: str, overrides: list[str], name: str, tmp_path: Path, plugins: Plugins
) -> None:
    (tmp_path / file).write_text(LINES + added)
    loaded = load_config(tmp_path / file, overrides, backend="cpu", plugins=plugins, check_files=False)
    assert loaded.config.run.name == name


@pytest.mark.parametrize(
    ("file", "added", "text"),
    [
        ("my run.toml", "", "run: not set; required table; it needs name"),
        ("my run.toml", "run.steps = 3", "run.name: not set; required"),
        ("first.toml", "run = 3", "run: found 3"),
    ],
)
def test_a_file_whose_name_cannot_be_that_of_a_run(
    file: str, added: str, text: str, tmp_path: Path, plugins: Plugins
) -> None:
    (tmp_path / file).write_text(LINES + added)
    with pytest.raises(ConfigError, match=text):
        load_config(tmp_path / file, backend="cpu", plugins=plugins, check_files=False)


def test_checks_of_models_can_be_deferred(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: object, **__: object) -> list[ConfigProblem]:
        return [ConfigProblem(path="model.path", found="x", hint="it has no layer")]

    monkeypatch.setattr("anygauge.config.check.model_rules", wrong)
    loaded = load({}, defers_models=True)
    with pytest.raises(ConfigError, match=r"has 1 problem:\n  model\.path: found 'x'; it has no layer"):
        loaded.check_models()
    with pytest.raises(ConfigError, match="has 1 problem:"):
        load({})
    with pytest.raises(ConfigError, match="has 2 problems:") as caught:  # all at once
        load({"train": "lr = -1.0"}, defers_models=True)
    assert "it has no layer" in str(caught.value)


@pytest.mark.parametrize(("written", "meant"), [("bf16", "bfloat16"), ("fp32", "float32"), ("none", None)])
def test_a_dtype_has_a_short_name(load: Load, written: str, meant: str | None) -> None:
    config = load({"train": f'dtype = "{written}"'}).config
    assert config.train.dtype == meant


@pytest.mark.parametrize(
    ("overrides", "hint"),
    [
        (["--save.best=eval/other"], "no evaluation has it; known: eval/e"),
        (["--save.best=eval/e", "--save.every=none"], "has no effect with save.every"),
    ],
)
def test_an_impossible_best_checkpoint(load: Load, tmp_path: Path, overrides: list[str], hint: str) -> None:
    (tmp_path / "e.jsonl").write_text("{}")
    data = f'--eval.data=["{tmp_path / "e.jsonl"}"]'
    with pytest.raises(ConfigError, match=hint):
        load(overrides=[data, *overrides])
    assert load(overrides=[data, "--save.best=eval/e"]).config.save.best == "eval/e"
