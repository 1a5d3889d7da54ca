"""Rules across keys, names that plugins provide, files."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anygauge.config import LoadedConfig, schema
from anygauge.config.tree import flatten
from anygauge.config.validate import _PLACEHOLDERS, keys, validate
from anygauge.plugins import Plugins
from anygauge_hooks.errors import ConfigError, UnknownNameError

Load = Callable[..., LoadedConfig]


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            ["--train.optimizer_steps=3"],
            "divide the 256 samples a step (32 prompts x 8): one of 1, 2, 4",
        ),
        (["--train.optimizer_steps=256", "--placement.train_workers=2"], "leaves workers without a sample"),
        (
            ["--rollout.prompts_per_step=2", "--placement.train_workers=3"],
            "placement.train_workers: found 3; leaves workers without a prompt: at most",
        ),
        (["--rollout.stop_token_ids=[7, 8]"], "stop_token_ids[1]: found 8; the model's vocab_size is 8"),
        (["--reward.function=json:lodas"], "has no 'lodas'. Did you mean loads or load?"),
        (["--reward.function=json:JSONDecoder.decod"], "has no 'JSONDecoder.decod'. Did you mean decode"),
        (["--data.label_key=none"], "data.label_key: not set; reward 'exact_match' takes a label"),
        (
            ["--eval.data=[]", "--eval.temperature=0", "--eval.samples_per_prompt=4"],
            "greedy decoding repeats one answer",
        ),
        (["--eval.interval=5"], "eval.data: not set; without data eval.interval has no effect"),
        (["--train.min_lr=1"], "train.min_lr: found 1.0; must be at most train.lr = 1e-06"),
        (["--train.adam_betas=[0.9, 1.0]"], "train.adam_betas: found [0.9, 1.0]"),
        (["--rollout.max_batch_tokens=100"], "at least 257 tokens"),
        (["--data.max_prompt_tokens=4000"], "may have 4256 tokens; the model takes 4096"),
        (["--train.engine=warp"], "train.engine: found 'warp'; no plugin provides it; available: megatron"),
        (["--rollout.engine=warp"], "rollout.engine: found 'warp'; no plugin"),
        (
            ["--algorithm.advantage=x"],
            "advantage: found 'x'; no plugin provides it; available: grpo",
        ),
        (["--algorithm.policy_loss=x"], "algorithm.policy_loss: found 'x'; no plugin"),
        (["--data.source=x"], "data.source: found 'x'; no plugin"),
        (['--run.trackers=["jsonl", "x"]'], "run.trackers: found 'x'; no plugin"),
        (["--reward.function=x"], "a function of your own is package.module:function"),
        (["--reward.function=exactmatch"], "available: exact_match; did you mean exact_match?"),
        (["--reward.function=json.loads"], "a function of your own is json:loads"),
        (["--reward.function=./own/mine.py"], "a function of your own is mine:FUNCTION"),
        (["--reward.function=own/mine.py:f"], "write mine:f, in the directory of mine.py"),
        (["--reward.function=a-b:c"], "write it as package.module:function"),
        (["--reward.function=no_such_module:f"], "no module 'no_such_module'"),
        (["--reward.function=no_such.module:f"], "importing 'no_such.module' raised ModuleNotFoundError"),
        (["--reward.options.loud=true"], "reward.options.loud: found True; 'exact_match' has no such option"),
        (["--algorithm.advantage_options={cent=true}"], "no such option; known: center, scale"),
        (['--data.train=["a.jsonl"]'], "data.train[0]: found 'a.jsonl'; no such file"),
        (
            ['--data.train=["What is 1+1?", "1+2="]'],
            '; a prompt is no file but a row: {"prompt": "What is 1+1?"}',
        ),
        (['--data.train=["*.jsonl"]'], "patterns are not expanded; name each file"),
        (['--data.train=["~/a.jsonl"]'], "~ is not expanded"),
        (['--data.train=["https://a.org/a.jsonl"]'], "addresses are not read; download the file"),
        (
            ['--data.train=["openai/gsm8k"]'],
            "a file of the data set openai/gsm8k on the hub is hf://datasets/",
        ),
        (['--eval.data=["a.jsonl"]'], "eval.data[0]: found 'a.jsonl'; no such file"),
        (
            ["--model.path={tmp}/modle"],
            "found '{tmp}/modle'; there is no directory of that path; did you mean {tmp}/model?",
        ),
        (
            ["--train.lora.rank=8", "--train.lora.path={tmp}/modle"],
            "train.lora.path: found '{tmp}/modle'; no such directory; did you mean {tmp}/model?",
        ),
        (
            ["--model.path=./modle/x"],
            "model.path: found './modle/x'; there is no directory of that path",
        ),
        (["--model.path=modle/x/"], "model.path: found 'modle/x/'; there is no directory of that path"),
        (["--model.path=Model"], "; relative paths start at the current directory"),
        (["--model.path=Model", "--data.apply_chat_template=true"], "model.path: found 'Model'; not a name"),
        (
            ['--data.train=["hf://datasets/a.jsonl"]'],
            "data.train[0]: found 'hf://datasets/a.jsonl'; a data file's name is hf://datasets/OWNER/NAME/FILE",
        ),
        (
            ["--algorithm.kl_coef=1", "--reference.path=/nope"],
            "path: found '/nope'; there is no directory of that path",
        ),
        (["--data.apply_chat_template=true"], "has no chat template"),
    ],
)
def test_problem(load: Load, tmp_path: Path, overrides: list[str], text: str) -> None:
    overrides, text = (
        [each.replace("{tmp}", str(tmp_path)) for each in overrides],
        text.replace("{tmp}", str(tmp_path)),
    )
    with pytest.raises(ConfigError) as caught:
        load({}, overrides, defers_models="the model" not in text)  # whose sizes are read later
    assert text in str(caught.value).replace(" on the command line", "")
    assert "c.toml has 1 problem:" in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["--train.optimizer_steps=4"],
        ["--reference.path=/nope"],
        ["--eval.interval=5", "--eval.data=[]"],
        ["--eval.temperature=0", "--eval.data=[]"],
        ["--reward.function=json:loads", "--reward.options={a=1}", "--data.label_key=none"],
        ["--algorithm.advantage_options={center=true}", "--reward.options={strip=false}"],
    ],
)
def test_no_problem(load: Load, overrides: list[str]) -> None:
    load({}, overrides)


@pytest.mark.parametrize(
    ("key", "value", "path"),
    [
        ("model.path", "runs/ow/hf", "model.path"),
        ("reference.path", "runs/ow/hf", "reference.path"),
        ("data.train", '["runs/ow/a.jsonl@[0:1]"]', "data.train[0]"),
        ("eval.data", '["runs/ow/a.jsonl"]', "eval.data[0]"),
        ("eval.datasets", '{test = {files = ["runs/ow/a.jsonl"]}}', "eval.datasets.test.files[0]"),
        ("data.cache", "runs/other/../ow/new", "data.cache"),
        ("hub.cache", "runs/ow", "hub.cache"),
    ],
)
def test_overwriting_must_not_delete_what_is_read(
    load: Load,
    tmp_path: Path,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    value: str,
    path: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "ow").mkdir(parents=True)
    (tmp_path / "runs" / "other").mkdir()
    (tmp_path / "runs" / "ow" / "hf").symlink_to(model_dir)
    (tmp_path / "runs" / "ow" / "a.jsonl").write_text('{"prompt": "1", "label": "1"}\n')
    arguments = [f"--{key}={value}", "--run.name=ow"]
    load({}, arguments)
    load({}, [f"--{key}={value}", "--run.name=o", "--run.overwrite=true"])
    with pytest.raises(ConfigError, match=r"run\.overwrite would delete it with ") as caught:
        load({}, [*arguments, "--run.overwrite=true"])
    assert f"{path}: found " in str(caught.value)
    assert "1 problem:" in str(caught.value)


def test_nothing_is_said_twice_about_a_key_that_is_wrong_already(load: Load) -> None:
    with pytest.raises(ConfigError, match="has 1 problem:"):
        load({}, ["--rollout.samples_per_prompt=0", "--train.optimizer_steps=3"])


def test_a_plugin_that_failed_to_load_is_named_where_its_name_is_missed(load: Load, plugins: Plugins) -> None:
    plugins.load_errors["extra"] = ImportError("libx.so")
    with pytest.raises(ConfigError, match=r"failed to load: extra \(ImportError\('libx.so'\)\)"):
        load({}, ["--train.engine=warp"])


OWN = """
from functools import partial
from anygauge_hooks.types import NamedFunction

def function(inputs, *, clip_low=0.2):
    return inputs

async def rollout(rollout, prompt, seed):
    return prompt

TOKENS = NamedFunction(name="mine", fn=function, kind="token", needs=("values",))
NUMBER = 3
"""
OWN_KEYS = {
    "algorithm.advantage": "own_functions:function",
    "algorithm.policy_loss": "own_functions:function",
    "algorithm.correction": "own_functions:function",
    "data.source": "own_functions:function",
    "rollout.function": "own_functions:rollout",
    "rollout.filters": "own_functions:function",
    "run.trackers": "own_functions:function",
    "reward.function": "own_functions:function",
}


@pytest.fixture
def own_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_functions.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_functions", raising=False)


def naming(key: str, name: str) -> tuple[str, Any]:
    value: Any = {"algorithm.correction": {name: {}}}.get(key, name)
    return key, [name] if key in ("rollout.filters", "run.trackers") else value


@pytest.mark.parametrize("key", OWN_KEYS)
@pytest.mark.usefixtures("own_functions")
def test_a_function_of_the_users_own_may_be_named_everywhere(load: Load, plugins: Plugins, key: str) -> None:
    reward = "options = {clip_low = 0.1}" if key == "reward.function" else ""
    tables = {"reward": reward} if reward else {}
    problems = found_problems(lambda: load(tables, [naming(key, OWN_KEYS[key])]))
    assert not [line for line in problems if line.startswith(key)]
    problems = found_problems(lambda: load(tables, [naming(key, "own_functions:misspelled")]))
    (problem,) = [line for line in problems if line.startswith(key)]
    assert "own_functions.py) has no 'misspelled'" in problem, "the file says which module was found"
    problems = found_problems(lambda: load(tables, [naming(key, "own_functions:NUMBER")]))
    (problem,) = [line for line in problems if line.startswith(key)]
    assert "it is not a function" in problem


def found_problems(run: Callable[[], object]) -> list[str]:
    try:
        run()
    except ConfigError as error:
        return [line.strip() for line in str(error).splitlines()]
    return []


@pytest.mark.usefixtures("own_functions")
def test_an_object_of_the_contract_says_what_its_function_needs(plugins: Plugins) -> None:
    estimator = plugins.get("register_advantage_estimators", "own_functions:TOKENS")
    assert (estimator.name, estimator.kind, estimator.needs) == ("own_functions:TOKENS", "token", ("values",))
    tracker = plugins.get("register_trackers", "own_functions:function")
    assert tracker.make("run") == "run"


def test_a_directory_is_no_prompt(load: Load, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model_dir.parent)
    with pytest.raises(ConfigError, match=rf"found '{model_dir.name}' on the command line; is a directory"):
        load({}, [f'--data.train=["{model_dir.name}"]'])


def test_an_engine_is_never_a_path(plugins: Plugins) -> None:
    with pytest.raises(UnknownNameError, match="'json:loads' for train engines"):
        plugins.get("register_train_engines", "json:loads")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", "found '[^']*'; has no config.json\n"),
        ("tokenizer.json", "has no tokenizer"),
        ("model.safetensors", "has no safetensors weights"),
    ],
)
def test_an_incomplete_model_directory(load: Load, model_dir: Path, file: str, text: str) -> None:
    (model_dir / file).unlink()
    with pytest.raises(ConfigError, match=text):
        load(defers_models=True)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("adapter_config.json", "is an adapter of peft; .* the adapter in train.lora.path"),
        ("manifest.json", "is a checkpoint of a run; `anygauge convert --to-hf"),
        ("config.toml", "is a run; the model that it wrote at its end is in .*/hf"),
    ],
)
def test_another_kind_of_directory(load: Load, model_dir: Path, file: str, text: str) -> None:
    for path in model_dir.iterdir():
        path.unlink()
    (model_dir / file).touch()
    with pytest.raises(ConfigError, match=text) as caught:
        load(defers_models=True)
    assert "1 problem" in str(caught.value)


def test_a_model_that_is_a_file(load: Load, model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="is a file; name the Hugging Face directory"):
        load({}, [f"--model.path={model_dir / 'config.json'}"], defers_models=True)


def test_weights_of_another_format_are_named(load: Load, model_dir: Path) -> None:
    (model_dir / "model.safetensors").rename(model_dir / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin is not read: .* save_pretrained"):
        load(defers_models=True)


def test_a_pointer_of_git_lfs(load: Load, model_dir: Path) -> None:
    (model_dir / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ConfigError, match=r"pointer of Git LFS; run `git lfs pull`"):
        load(defers_models=True)


@pytest.mark.parametrize(
    ("size", "text"),
    [(70, "has 70 bytes, its header says 72"), (30, "is torn or no safetensors file"), (4, "is torn or")],
)
def test_a_torn_weight_file(load: Load, model_dir: Path, size: int, text: str) -> None:
    path = model_dir / "model.safetensors"
    content = path.read_bytes()
    assert len(content) == 72
    path.write_bytes(content[:size])
    with pytest.raises(ConfigError, match=f"its model.safetensors {text}"):
        load(defers_models=True)


@pytest.mark.parametrize(
    ("vocabulary", "added", "largest"),
    [({"a": 0, "b": 8}, [], 8), ({"a": 0}, [{"id": 9}], 9), ([["a", 0.0]] * 11, [], 10)],
)
def test_a_tokenizer_that_is_larger_than_the_embedding(
    load: Load, model_dir: Path, vocabulary: object, added: list[object], largest: int
) -> None:
    tokenizer = {"model": {"vocab": vocabulary}, "added_tokens": added}
    (model_dir / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=f"token ids up to {largest}, .* vocab_size of only 8"):
        load()


def test_a_tokenizer_that_fits(load: Load, model_dir: Path) -> None:
    tokenizer = {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 7}]}
    (model_dir / "tokenizer.json").write_text(json.dumps(tokenizer))
    load()


def test_a_tokenizer_that_is_no_json(load: Load, model_dir: Path) -> None:
    (model_dir / "tokenizer.json").write_text("[")
    with pytest.raises(ConfigError, match=r"its tokenizer\.json cannot be read: JSONDecodeError"):
        load()


def test_a_reward_module_that_cannot_be_imported(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rewards_that_exit.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"importing 'rewards_that_exit' raised SystemExit\(3\)"):
        load({}, ["--reward.function=rewards_that_exit:f"])


def test_a_run_directory_that_cannot_be_made(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"train\.jsonl is a file"):
        load({}, [f"--run.directory={tmp_path / 'train.jsonl' / 'runs'}"])
    with pytest.raises(ConfigError, match="; is a file; name"):
        load({}, [f"--run.directory={tmp_path / 'train.jsonl'}"])
    access = os.access
    # Root may write where the mode says otherwise.
    monkeypatch.setattr("os.access", lambda path, mode: not mode & os.W_OK and access(path, mode))
    with pytest.raises(ConfigError, match=f"cannot be made: {tmp_path} is not writable"):
        load({}, [f"--run.directory={tmp_path / 'a' / 'b'}"])


def test_an_architecture_is_matched_exactly(load: Load, model_dir: Path) -> None:
    (model_dir / "config.json").write_text(json.dumps({"architectures": ["Toy2ForCausalLM"]}))
    with pytest.raises(ConfigError, match="architecture Toy2ForCausalLM; known: ToyForCausalLM"):
        load()


def test_missing_shards_are_counted(load: Load, model_dir: Path) -> None:
    (model_dir / "model.safetensors").rename(model_dir / "a.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"lacks 1 of 2 weight files, the first is b\.safetensors"):
        load()


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
def test_either_place_of_a_chat_template_will_do(load: Load, model_dir: Path, place: str) -> None:
    (model_dir / place).write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert load({}, ["--data.apply_chat_template=true"]).config.data.apply_chat_template


def test_an_agent_needs_a_chat_template(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"rollout.function: .*has no chat template; add chat_template"):
        load({}, ["--rollout.function=agent"])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"architectures": ["ToyForCausalLM", "X"]}, r".*model.path holds \['ToyForCausalLM'\]"),
        (
            {"rope_theta": 2.0, "max_position_embeddings": 8},
            ".*holds rope_theta = 2.0; model.path holds None",
        ),
    ],
)
def test_a_reference_that_computes_otherwise(
    load: Load, model_dir: Path, tmp_path: Path, changes: dict[str, object], problem: str
) -> None:
    other = tmp_path / "other"
    shutil.copytree(model_dir, other)
    options = ["--algorithm.kl_coef=0.1", f"--reference.path={other}"]
    load({}, options)
    hf = json.loads((model_dir / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**hf, **changes}))
    with pytest.raises(ConfigError, match=rf"reference.path: {problem}"):
        load({}, options)


def test_files_need_not_exist_when_they_are_not_looked_at(load: Load) -> None:
    load({}, ["--model.path=/nope", '--data.train=["nope"]'], check_files=False)


def test_every_required_key_has_a_placeholder() -> None:
    assert flatten(_PLACEHOLDERS).keys() == {path for path, field in keys() if field.is_required()}
    assert isinstance(validate({}).config, schema.Config)
