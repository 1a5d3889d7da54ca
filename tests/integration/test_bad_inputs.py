"""Hundreds of bad inputs: each ends in an error with a code, before any process starts, and nothing is lost.

Every case takes the path of the command with ``run.overwrite = true``, on a directory that holds an earlier
run: whatever is wrong must be found before that is touched.
"""

from __future__ import annotations

import fcntl
import json
import re
import shutil
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anygauge.config.load import load_config, write_resolved
from anygauge.config.validate import keys
from anygauge.plugins import Plugins, load_plugins
from anygauge.testing.tiny import tiny_qwen3, tiny_tokenizer
from anygauge.trainer import run
from anygauge.trainer.checkpoints import CheckpointWriter
from anygauge.trainer.inputs import read_inputs
from anygauge_hooks.errors import AnygaugeError

CODED = re.compile(r"\[AG\d{3}\]\Z")
GOOD = {"prompt": "1+2=", "label": "3"}
generated = settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

Attempt = Callable[..., AnygaugeError]


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return load_plugins(only=["cpu", "models"])


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a model, data, a config and an earlier run."""
    root = tmp_path_factory.mktemp("bad")
    tiny_qwen3(root / "model")
    chat = tiny_tokenizer(root / "chat", texts=["What is 1+2? It is 3."])
    tiny_qwen3(root / "chat", tokenizer=chat)
    for name in ("train.jsonl", "eval.jsonl"):
        (root / name).write_text("\n".join(json.dumps(GOOD | {"prompt": f"{n}+2="}) for n in range(8)))
    (root / "run.toml").write_text(
        f"""
        [run]
        name = "kept"
        directory = "{root}/runs"
        overwrite = true
        [model]
        path = "{root}/model"
        [data]
        train = ["{root}/train.jsonl"]
        cache = "{root}/cache"
        [reward]
        function = "exact_match"
        [rollout]
        prompts_per_step = 4
        samples_per_prompt = 2
        max_new_tokens = 4
        [eval]
        data = ["{root}/eval.jsonl"]
        [placement]
        launcher = "local"
        """
    )
    earlier = root / "runs" / "kept"
    (earlier / "logs").mkdir(parents=True)
    (earlier / "config.toml").write_text('[run]\nname = "kept"\n')
    (earlier / "environment.json").write_text("{}\n")
    (earlier / "metrics.jsonl").write_text('{"train/step": 1, "train/loss": 0.5}\n')
    return root


@pytest.fixture
def attempt(workplace: Path, plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> Attempt:
    """Return a function that runs the config with overrides and returns the error that it ends in."""

    def reached(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the input was taken for a good one: the workers would start")

    monkeypatch.setattr(run, "launch_workers", reached)
    monkeypatch.chdir(workplace)

    def attempt(*overrides: tuple[str, Any], config: Path = workplace / "run.toml") -> AnygaugeError:
        before = contents(workplace / "runs")
        with pytest.raises(AnygaugeError) as caught:
            run.train(load_config(config, overrides, backend="cpu", plugins=plugins), plugins)
        assert contents(workplace / "runs") == before
        assert CODED.search(str(caught.value)), str(caught.value)
        assert caught.value.hint, "it says what to do"
        assert len(str(caught.value)) < 4000
        return caught.value

    return attempt


def contents(directory: Path) -> dict[str, bytes]:
    """Return every file of a directory with what it holds, and every directory; not who holds it."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else b""
        for path in sorted(directory.rglob("*"))
        if path.name != ".lock"
    }


# -------------------------------------------------------------------------
# Rows
# -------------------------------------------------------------------------

ROWS = [
    b"",
    b"\n\n  \n",
    b"{",
    b"}",
    b"[]",
    b"null",
    b"true",
    b"3",
    b'"prompt"',
    b"prompt,label\n1+2=,3",
    b"{'prompt': '1+2=', 'label': '3'}",
    b'{"prompt": "1+2=", "label": "3",}',
    b'{"prompt": "1+2=" "label": "3"}',
    b'{"prompt": "1+2=", "label": NaN}',
    b'{"prompt": "1+2=", "label": Infinity}',
    b'{"prompt": "1+2=", "label": -Infinity}',
    b'{"prompt": "1+2=", "label": "3"} trailing',
    b'{"prompt": "1+2=", "label": "3"}{"prompt": "1+2=", "label": "3"}',
    b'{"prompt": "1+2=", "prompt": "1+3=", "label": "3"}',
    b'{"label": "3"}',
    b'{"prompt": "1+2="}',
    b'{"Prompt": "1+2=", "label": "3"}',
    b'{"prompt": null, "label": "3"}',
    b'{"prompt": 12, "label": "3"}',
    b'{"prompt": 1.5, "label": "3"}',
    b'{"prompt": true, "label": "3"}',
    b'{"prompt": {}, "label": "3"}',
    b'{"prompt": {"text": "1+2="}, "label": "3"}',
    b'{"prompt": "", "label": "3"}',
    b'{"prompt": "   ", "label": "3"}',
    b'{"prompt": "\\n", "label": "3"}',
    b'{"prompt": [], "label": "3"}',
    b'{"prompt": ["1+2="], "label": "3"}',
    b'{"prompt": [{"role": "user", "content": "1+2="}], "label": "3"}',
    b'{"prompt": "1+2=", "label": null}',
    b'{"prompt": "\\ud800", "label": "3"}',
    b'{"prompt": "1+2=", "label": "\\udfff"}',
    b'\xff\xfe{"prompt": "1+2=", "label": "3"}',
    b'{"prompt": "1+2=\xff", "label": "3"}',
    b'{"prompt": "a letter that the tokenizer does not know", "label": "3"}',
    b'{"prompt": "' + b"1" * 5000 + b'", "label": "3"}',
    b'{"prompt": "1+2=", "label": "3"}\n{"prompt": "1+2="',
    b'{"prompt": "1+2=", "label": "3"}\n\n[1]',
    b'{"prompt": "1+2=", "label": "3"}\r\n{"prompt": 5, "label": "3"}\r\n',
    b"[" * 100_000,
    b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b', "label": "3"}',
    b'{"a":' * 5000,
    b'{"prompt": "1+2=\x00", "label": "3"}',
    b"\x00\x00\x00\x00",
    b"PAR1 this is no parquet PAR1",
    b"\x1f\x8b\x08\x00gzip",
    b"<html><body>404 Not Found</body></html>",
    b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12",
]


@pytest.mark.parametrize("content", ROWS, ids=range(len(ROWS)))
def test_bad_rows(attempt: Attempt, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    assert "rows.jsonl" in str(attempt(("data.train", [str(path)])))


CHATS: list[Any] = [
    [],
    [1],
    ["hello"],
    [{}],
    [{"role": "user"}],
    [{"content": "hello"}],
    [{"role": "", "content": "hello"}],
    [{"role": 1, "content": "hello"}],
    [{"role": None, "content": "hello"}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": {"text": "hello"}}],
    {"role": "user", "content": "hello"},
    7,
    "",
    None,
]


@pytest.mark.parametrize("messages", CHATS, ids=range(len(CHATS)))
def test_bad_chats(attempt: Attempt, workplace: Path, tmp_path: Path, messages: Any) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"prompt": messages, "label": "3"}))
    chat = (("model.path", f"{workplace}/chat"), ("data.apply_chat_template", True))
    assert "chats.jsonl:1" in str(attempt(*chat, ("data.train", [str(path)])))


NO_ANSWER: list[Any] = [
    [{"role": "user", "content": "hello"}],
    [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}],
    [{"role": "user", "content": "hello"}, {"role": "assistant"}],
    [{"role": "user", "content": "hello"}, {"role": "assistant", "content": 3}],
    [{"role": "user", "content": "hello"}, {"role": "Assistant", "content": "hi"}],
    [],
]


@pytest.mark.parametrize("messages", NO_ANSWER, ids=range(len(NO_ANSWER)))
def test_conversations_to_learn_nothing_from(
    attempt: Attempt, workplace: Path, tmp_path: Path, messages: Any
) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": messages}))
    config = tmp_path / "sft.toml"
    config.write_text(
        f"""
        run = {{name = "kept", task = "sft", directory = "{workplace}/runs", overwrite = true}}
        model = "{workplace}/chat"
        [data]
        train = ["{path}"]
        input_key = "messages"
        label_key = "none"
        apply_chat_template = true
        cache = "{workplace}/cache"
        """
    )
    error = attempt(config=config)
    assert "chats.jsonl:1" in str(error)


@generated
@given(
    row=st.fixed_dictionaries({"prompt": st.text("0123456789+-=", min_size=1), "label": st.integers()}),
    data=st.data(),
)
def test_torn_rows(attempt: Attempt, workplace: Path, row: dict[str, Any], data: st.DataObject) -> None:
    line = json.dumps(row)
    kept = data.draw(st.integers(1, len(line) - 1))
    path = workplace / "torn.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{line[:kept]}")
    assert "torn.jsonl:2" in str(attempt(("data.train", [str(path)])))


not_prompts = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.lists(st.integers(), max_size=2),
    st.text(" \t\n", max_size=4),
)


@generated
@given(value=not_prompts)
def test_values_that_are_no_prompt(attempt: Attempt, workplace: Path, value: Any) -> None:
    path = workplace / "values.jsonl"
    path.write_text(json.dumps({"prompt": value, "label": "3"}))
    assert "values.jsonl:1" in str(attempt(("data.train", [str(path)])))


# -------------------------------------------------------------------------
# Configs
# -------------------------------------------------------------------------

WRONG: list[tuple[str, Any]] = [
    ("run.steps", 0),
    ("run.steps", -1),
    ("run.steps", 1.5),
    ("run.name", ""),
    ("run.name", "../escape"),
    ("run.name", "a/b"),
    ("run.name", ".hidden"),
    ("run.seed", -1),
    ("run.seed", 2**63),
    ("run.task", "dpo"),
    ("run.trackers", ["jsonl", "no-such-tracker"]),
    ("run.timeout_s", 0),
    ("run.tracker_options", {"no-such-tracker": {"project": "x"}}),
    ("model.path", ""),
    ("model.path", "no-such-directory"),
    ("model.path", "/dev/null"),
    ("model", 5),
    ("data.train", []),
    ("data.train", "train.jsonl"),
    ("data.train", ["no-such-file.jsonl"]),
    ("data.train", ["."]),
    ("data.train", ["train.jsonl@[1:2"]),
    ("data.train", ["train.jsonl@[a:b]"]),
    ("data.train", ["train.jsonl@[5]"]),
    ("data.train", ["train.jsonl@[0:0]"]),
    ("data.train", ["train.jsonl@[100:]"]),
    ("data.train", [{"path": "train.jsonl", "weight": 0}]),
    ("data.train", [{"path": "train.jsonl", "weight": -1.0}]),
    ("data.train", [{"path": "train.jsonl", "weight": 1.0}, "eval.jsonl"]),
    ("data.train", [{"path": "train.jsonl", "name": "a b"}]),
    ("data.train", [{"file": "train.jsonl"}]),
    ("data.train", ["train.jsonl", "train.jsonl"]),
    ("data.source", "no-such-source"),
    ("data.input_key", "question"),
    ("data.label_key", "answer"),
    ("data.metadata_key", "extra"),
    ("data.tools_key", "tools"),
    ("data.apply_chat_template", True),
    ("data.system_prompt", "be kind"),
    ("data.chat_template_kwargs", {"enable_thinking": False}),
    ("data.max_prompt_tokens", 1),
    ("data.max_prompt_tokens", 0),
    ("reward.function", "no_such_reward"),
    ("reward.function", "no_such_module:f"),
    ("reward.function", "json:no_such_function"),
    ("reward.function", "json:"),
    ("reward.function", ":f"),
    ("reward.function", "none"),
    ("reward.function", "json:__name__"),
    ("reward.options", {"loud": True}),
    ("reward.parts", {"a": {"function": "exact_match"}}),
    ("reward.per", "batch"),
    ("reward.timeout_s", 0),
    ("reward.memory_gib", -1),
    ("reward.max_failed_ratio", 1.5),
    ("reward.overlong_buffer", 5000),
    ("rollout.engine", "no-such-engine"),
    ("rollout.prompts_per_step", 0),
    ("rollout.samples_per_prompt", 0),
    ("rollout.max_new_tokens", 10**9),
    ("rollout.temperature", 0),
    ("rollout.temperature", -1.0),
    ("rollout.top_p", 0),
    ("rollout.top_p", 1.5),
    ("rollout.top_k", -1),
    ("rollout.stop", [""]),
    ("rollout.stop_token_ids", [10**6]),
    ("rollout.max_batch_tokens", 2),
    ("rollout.dtype", "int8"),
    ("algorithm.advantage", "no-such-estimator"),
    ("algorithm.advantage_options", {"loud": True}),
    ("algorithm.policy_loss", "no-such-loss"),
    ("algorithm.clip_low", 1.0),
    ("algorithm.clip_low", 0),
    ("algorithm.dual_clip", 0.5),
    ("algorithm.kl_coef", -0.1),
    ("algorithm.kl_type", "k9"),
    ("algorithm.aggregation", "mean"),
    ("train.engine", "no-such-engine"),
    ("train.optimizer_steps", 3),
    ("train.optimizer_steps", 0),
    ("train.micro_batch_tokens", 0),
    ("train.lr", 0),
    ("train.lr", -1e-6),
    ("train.lr", "fast"),
    ("train.min_lr", 1.0),
    ("train.lr_schedule", "linear-ish"),
    ("train.adam_betas", [0.9]),
    ("train.adam_betas", [0.9, 1.0]),
    ("train.adam_betas", [0.9, 0.99, 0.999]),
    ("train.clip_grad", -1),
    ("train.recompute", "everything"),
    ("train.megatron", {"no_such_field": 1}),
    ("train.megatron", {"num_layers": 3}),
    ("eval.interval", 0),
    ("eval.data", ["no-such-file.jsonl"]),
    ("eval.temperature", -1),
    ("eval.datasets", {"eval": {"files": ["eval.jsonl"]}}),
    ("eval.datasets", {"math": {"files": []}}),
    ("eval.datasets", {"math": {"files": ["no-such-file.jsonl"]}}),
    ("eval.datasets", {"math": {"path": "eval.jsonl"}}),
    ("eval.datasets", {"a b": {"files": ["eval.jsonl"]}}),
    ("eval.datasets", {"math": {"files": ["eval.jsonl"], "reward": {"function": "no_such_reward"}}}),
    ("eval.datasets", {"math": {"files": ["eval.jsonl"], "temperature": 0, "samples_per_prompt": 4}}),
    ("save.every", 0),
    ("save.keep", 0),
    ("save.hf_every", -1),
    ("debug.mode", "both"),
    ("debug.mode", "train_only"),
    ("debug.replay_rollouts", "no-such-directory"),
    ("debug.replay_batches", "no-such-directory"),
    ("hub.source", "somewhere"),
    ("placement.launcher", "slurm"),
    ("placement.num_workers", 0),
    ("placement.num_workers", 1000),
    ("cluster.address", ""),
    ("cluster.ip_version", 5),
    ("no_such_table.key", 1),
    ("run.no_such_key", 1),
    ("train.leaning_rate", 1e-3),
]


@pytest.mark.parametrize(("path", "value"), WRONG, ids=[f"{n}-{path}" for n, (path, _) in enumerate(WRONG)])
def test_bad_values(attempt: Attempt, path: str, value: Any) -> None:
    attempt((path, value))


TEXTS = [
    "",
    "[run]",
    "run",
    "run = 5",
    '[run]\nname = "x"',
    "[run]\nname = x",
    '[run\nname = "x"',
    '[run]\nname = "x"\nname = "y"',
    '[run]\nname = "x"\n[run]\nsteps = 1',
    '{"run": {"name": "x"}}',
    "run:\n  name: x\n",
    '[run]\nname = "x"\n[on]\ncpu = 3',
    '[run]\nname = "x"\n[on.CPU.train]\nlr = 1.0',
    "\x00",
]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_bad_files(attempt: Attempt, tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    assert "bad.toml" in str(attempt(config=path))


@pytest.mark.parametrize("name", ["missing.toml", ".", "runs", "model/model.safetensors"])
def test_what_is_no_config_file(attempt: Attempt, workplace: Path, name: str) -> None:
    attempt(config=workplace / name)


def wrong_types() -> Iterator[tuple[str, Any]]:
    """Yield a value of a wrong kind for every key of the schema."""
    for path, field in keys():
        shown = str(field.annotation)
        yield path, 3 if "dict" in shown and "Literal" not in shown else {"a": object.__name__}


KINDS = [
    (path, value) for path, value in wrong_types() if not path.endswith(("options", "megatron", "kwargs"))
]


@pytest.mark.parametrize(("path", "value"), KINDS, ids=[path for path, _ in KINDS])
def test_values_of_a_wrong_kind(attempt: Attempt, path: str, value: Any) -> None:
    assert path.split(".")[0] in str(attempt((path, value)))


@generated
@given(
    path=st.sampled_from([path for path, _ in keys()]),
    noise=st.text("abcdefghijklmnopqrstuvwxyz_", min_size=3, max_size=8),
)
def test_misspelt_keys(attempt: Attempt, path: str, noise: str) -> None:
    assert "unknown key" in str(attempt((f"{path}{noise}q", 1)))


# -------------------------------------------------------------------------
# Models
# -------------------------------------------------------------------------


def cut(name: str, kept: float) -> Callable[[Path], None]:
    """Return what leaves only the first part of a file."""

    def damage(model: Path) -> None:
        path = model / name
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * kept)])

    return damage


def write(name: str, content: bytes) -> Callable[[Path], None]:
    """Return what replaces a file."""
    return lambda model: (model / name).write_bytes(content) and None


def edit(name: str, **values: Any) -> Callable[[Path], None]:
    """Return what changes keys of a JSON file."""

    def damage(model: Path) -> None:
        path = model / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return damage


def remove(*names: str) -> Callable[[Path], None]:
    """Return what removes files."""
    return lambda model: [(model / name).unlink() for name in names] and None


HEADER = struct.pack("<Q", 2**62)
DAMAGES: Mapping[str, Callable[[Path], None]] = {
    "no config": remove("config.json"),
    "no weights": remove("model.safetensors"),
    "no tokenizer": remove("tokenizer.json", "tokenizer_config.json"),
    "nothing": lambda model: [path.unlink() for path in model.iterdir()] and None,
    "empty config": write("config.json", b""),
    "config is a list": write("config.json", b"[]"),
    "config is null": write("config.json", b"null"),
    "config is no text": write("config.json", b"\xff\xfe\x00"),
    "torn config": cut("config.json", 0.5),
    "no architecture": edit("config.json", architectures=None),
    "empty architectures": edit("config.json", architectures=[]),
    "unknown architecture": edit("config.json", architectures=["NoSuchForCausalLM"]),
    "small vocabulary": edit("config.json", vocab_size=3),
    "empty weights": write("model.safetensors", b""),
    "short weights": write("model.safetensors", b"\x01\x02"),
    "huge header": write("model.safetensors", HEADER),
    "header is no JSON": write("model.safetensors", struct.pack("<Q", 4) + b"abcd"),
    "torn weights": cut("model.safetensors", 0.9),
    "half a header": cut("model.safetensors", 0.001),
    "weights are a page": write("model.safetensors", b"<html>404</html>"),
    "weights are a pointer": write("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"),
    "bad index": write("model.safetensors.index.json", b"{"),
    "index is a list": write("model.safetensors.index.json", b"[]"),
    "index of nothing": write("model.safetensors.index.json", b'{"metadata": {}}'),
    "index of an absent file": write(
        "model.safetensors.index.json", b'{"weight_map": {"a": "absent.safetensors"}}'
    ),
    "torn tokenizer": cut("tokenizer.json", 0.5),
    "empty tokenizer": write("tokenizer.json", b""),
    "tokenizer is a list": write("tokenizer.json", b"[]"),
    "code": edit(
        "config.json", auto_map={"AutoModelForCausalLM": "evil.Model"}, architectures=["EvilForCausalLM"]
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_models(attempt: Attempt, workplace: Path, tmp_path: Path, name: str) -> None:
    model = Path(shutil.copytree(workplace / "model", tmp_path / "model"))
    DAMAGES[name](model)
    attempt(("model.path", str(model)))


@generated
@given(kept=st.floats(0, 0.999))
def test_torn_weights(attempt: Attempt, workplace: Path, kept: float) -> None:
    model = workplace / "torn"
    if not model.exists():
        shutil.copytree(workplace / "model", model)
    whole = (workplace / "model" / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[: int(len(whole) * kept)])
    assert "model.safetensors" in str(attempt(("model.path", str(model))))


# -------------------------------------------------------------------------
# Checkpoints
# -------------------------------------------------------------------------


class OneRank:
    """Answers a checkpoint writer as a group of one worker does."""

    def call(self, method: str, **arguments: Any) -> list[Any]:
        if method == "save_checkpoint":
            directory = Path(arguments["path"])
            (directory / "rank-00000.json").write_text(json.dumps({"rank": 0}))
            (directory / "rank-00000.safetensors").write_bytes(bytes(1000))
        return [True]


@pytest.fixture(scope="module")
def stopped(workplace: Path, plugins: Plugins) -> Path:
    """Return the directory of a run that ended after step 20, to be copied."""
    directory = workplace / "stopped"
    (directory / "logs").mkdir(parents=True)
    loaded = load_config(workplace / "run.toml", [("run.overwrite", False)], backend="cpu", plugins=plugins)
    write_resolved(loaded.config, directory / "config.toml")
    (directory / "environment.json").write_text("{}\n")
    (directory / "metrics.jsonl").write_text('{"train/step": 20}\n')
    source = read_inputs(loaded.config, plugins).source
    writer = CheckpointWriter(directory, loaded.config, OneRank())  # type: ignore[arg-type]
    writer.start(20, {"step": 20, "version": 20, "source": source.state_dict()})
    assert writer.finish() is not None
    writer.close()
    return directory


CHECKPOINT = "checkpoints/step-00000020"
RUN_DAMAGES: Mapping[str, Callable[[Path], None]] = {
    "no manifest": remove(f"{CHECKPOINT}/manifest.json"),
    "empty manifest": write(f"{CHECKPOINT}/manifest.json", b""),
    "torn manifest": cut(f"{CHECKPOINT}/manifest.json", 0.5),
    "manifest is a list": write(f"{CHECKPOINT}/manifest.json", b"[]"),
    "manifest is null": write(f"{CHECKPOINT}/manifest.json", b"null"),
    "manifest is no text": write(f"{CHECKPOINT}/manifest.json", b"\xff\xfe"),
    "another format": edit(f"{CHECKPOINT}/manifest.json", format=99),
    "no format": edit(f"{CHECKPOINT}/manifest.json", format=None),
    "files are a list": edit(f"{CHECKPOINT}/manifest.json", files=[]),
    "no files": edit(f"{CHECKPOINT}/manifest.json", files={}),
    "files without sizes": edit(f"{CHECKPOINT}/manifest.json", files={"driver.json": {}}),
    "more ranks": edit(f"{CHECKPOINT}/manifest.json", world_size=4),
    "no driver": remove(f"{CHECKPOINT}/driver.json"),
    "torn driver": cut(f"{CHECKPOINT}/driver.json", 0.7),
    "edited driver": edit(f"{CHECKPOINT}/driver.json", step=21),
    "no tensors": remove(f"{CHECKPOINT}/rank-00000.safetensors"),
    "empty tensors": write(f"{CHECKPOINT}/rank-00000.safetensors", b""),
    "torn tensors": cut(f"{CHECKPOINT}/rank-00000.safetensors", 0.999),
    "one bit": write(f"{CHECKPOINT}/rank-00000.safetensors", bytes(999) + b"\x01"),
    "no scalars": remove(f"{CHECKPOINT}/rank-00000.json"),
    "edited scalars": edit(f"{CHECKPOINT}/rank-00000.json", rank=1),
    "an empty checkpoint": lambda run: [path.unlink() for path in (run / CHECKPOINT).iterdir()] and None,
    "no config": remove("config.toml"),
    "no environment": remove("environment.json"),
    "torn config": cut("config.toml", 0.5),
    "empty config": write("config.toml", b""),
    "config is no text": write("config.toml", b"\xff\xfe"),
}


@pytest.fixture
def damaged(workplace: Path, stopped: Path) -> Iterator[Path]:
    """Return a copy of the stopped run, among the runs."""
    directory = workplace / "runs" / "damaged"
    shutil.copytree(stopped, directory)
    yield directory
    shutil.rmtree(directory)


RESUME = (("run.name", "damaged"), ("run.overwrite", False), ("run.resume", True))


@pytest.mark.parametrize("name", RUN_DAMAGES)
def test_damaged_runs(attempt: Attempt, damaged: Path, name: str) -> None:
    RUN_DAMAGES[name](damaged)
    attempt(*RESUME)


OTHER_RUNS: list[tuple[str, Any]] = [
    ("train.lr", 0.5),
    ("run.seed", 7),
    ("model.path", "chat"),
    ("rollout.temperature", 0.5),
    ("rollout.samples_per_prompt", 4),
    ("algorithm.clip_low", 0.1),
    ("reward.function", "f1"),
    ("data.shuffle", False),
    ("run.task", "sft"),
]


@pytest.mark.parametrize(("path", "value"), OTHER_RUNS, ids=[path for path, _ in OTHER_RUNS])
def test_resuming_another_run(attempt: Attempt, damaged: Path, path: str, value: Any) -> None:
    assert path.split(".")[1] in str(attempt(*RESUME, (path, value)))


def test_resuming_with_other_rows(attempt: Attempt, damaged: Path, workplace: Path) -> None:
    data = workplace / "train.jsonl"
    before = data.read_bytes()
    data.write_bytes(before.replace(b"7+2=", b"9+9="))
    try:
        attempt(*RESUME)
    finally:
        data.write_bytes(before)


def test_a_run_that_goes_on_elsewhere(attempt: Attempt, damaged: Path) -> None:
    with (damaged / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "in use" in str(attempt(*RESUME))


# -------------------------------------------------------------------------
# Paths
# -------------------------------------------------------------------------


def test_a_run_directory_that_no_run_made(attempt: Attempt, workplace: Path) -> None:
    directory = workplace / "runs" / "photos"
    directory.mkdir(exist_ok=True)
    (directory / "cat.png").write_bytes(b"meow")
    assert "was not made by a run" in str(attempt(("run.name", "photos")))


def test_an_earlier_run_without_leave(attempt: Attempt) -> None:
    assert "--resume" in str(attempt(("run.overwrite", False)))


def test_both_resume_and_overwrite(attempt: Attempt) -> None:
    attempt(("run.resume", True))


@pytest.mark.parametrize("directory", ["/dev/null", "/proc/nowhere", "train.jsonl", "train.jsonl/below"])
def test_no_place_for_a_run(attempt: Attempt, directory: str) -> None:
    assert "run.directory" in str(attempt(("run.directory", directory)))


def count(*lists: Collection[Any]) -> int:
    """Return the number of cases in lists."""
    return sum(map(len, lists))


def test_they_are_three_hundred() -> None:
    by_hand = count(ROWS, CHATS, NO_ANSWER, WRONG, TEXTS, KINDS, DAMAGES, RUN_DAMAGES, OTHER_RUNS)
    by_hypothesis = 4 * generated.max_examples
    assert by_hand >= 300
    assert by_hand + by_hypothesis >= 500
