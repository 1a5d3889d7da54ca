"""Config keys about images, video and sound must agree, and fit the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anygauge.config import Config, LoadedConfig
from anygauge.config.rules.media import media_mismatches, model_media
from anygauge.config.rules.model import _rollout_engine, model_rules
from anygauge.config.schema import Lora, Parallel
from anygauge.plugins import load_plugins
from anygauge.testing.tiny import tiny_tokenizer
from anygauge.testing.tiny_vision import add_vision_tokens, tiny_qwen3_vl
from anygauge.trainer.teacher import is_same_model
from anygauge_hooks.errors import ConfigError
from anygauge_hooks.models import ModelSpec

Load = Callable[..., LoadedConfig]
EVALUATED = 'eval.datasets.e={files = ["e.jsonl"], multimodal_keys = {audio = "sound"}}'
IMAGES = 'data.multimodal_keys={image = "images"}'


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (
            ["media.max_pixels=1000"],
            "media.max_pixels: found 1000 on the command line; has no effect without",
        ),
        (
            ['media.on_error="drop"'],
            "media.on_error: found 'drop' on the command line; has no effect without",
        ),
        (['train.freeze=["vision"]'], "has no effect without data.multimodal_keys or model.modalities"),
        (['train.freeze=["vison"]'], "names of weights have dots in them; did you mean vision?"),
        (['train.freeze=["["]'], "no part (vision, audio, language) and no regular expression: unterminated"),
        ([IMAGES, 'model.modalities=["audio"]'], "lacks image, which data.multimodal_keys names"),
        ([IMAGES, 'train.freeze=["audio"]'], "there is no tower for audio: the run has only image"),
        ([IMAGES, "media.min_pixels=9", "media.max_pixels=8"], "must be at most media.max_pixels = 8"),
        ([IMAGES, 'media.store="ray"', 'placement.launcher="local"'], "leave this out"),
        (
            [IMAGES, 'model.modalities=["image"]', EVALUATED],
            "lacks audio, which eval.datasets.e.multimodal_keys names",
        ),
        (
            ['eval.datasets.e={files = ["e.jsonl"], input_key = "q", multimodal_keys = {image = "q"}}'],
            "eval.datasets.e.multimodal_keys.image: found 'q'",
        ),
        (['data.multimodal_keys={image = "label"}'], "another key names the field 'label' too"),
        (['data.multimodal_keys={image = "a", video = "a"}'], "another key names the field 'a' too"),
    ],
)
def test_keys_that_do_not_go_together(load: Load, keys: list[str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(overrides=[f"--{key}" for key in keys])
    assert text in str(caught.value)


def test_a_model_of_text_is_not_given_images(load: Load) -> None:
    with pytest.raises(ConfigError, match="takes only text; leave out image"):
        load(overrides=[f"--{IMAGES}"])


def test_an_evaluation_of_images_makes_a_run_one_of_images(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"eval.datasets.e.multimodal_keys: .*\n?.*leave out audio"):
        load(overrides=[f"--{EVALUATED}"])


PLUGINS = load_plugins()
FAMILIES: dict[str, ModelSpec] = PLUGINS.named("register_models")
MEGATRON: Any = PLUGINS.get("register_train_engines", "megatron")


def problems(
    family: str,
    *kinds: str,
    named: bool = False,
    parallel: dict[str, int] | None = None,
    megatron: dict[str, Any] | None = None,
) -> list[Any]:
    spec = FAMILIES[family]
    config: Any = SimpleNamespace(
        model=SimpleNamespace(modalities=list(kinds) if named else None),
        data=SimpleNamespace(multimodal_keys={kind: kind for kind in kinds}),
        eval=SimpleNamespace(datasets={}),
        train=SimpleNamespace(
            engine="megatron",
            parallel=Parallel(**(parallel or {})),
            megatron=megatron or {},
            router_replay=False,
            prefix_packing=False,
            lora=Lora(),
        ),
        critic=SimpleNamespace(megatron=None),
        teacher=SimpleNamespace(megatron=None),
    )
    hf = {**spec.tiny(), "architectures": [spec.architectures[0]]}
    sizes = MEGATRON.check_model(config, "model.path", spec, hf)
    return [*model_media(config, hf, PLUGINS), *(each for each in sizes if "features" in each.hint)]


def test_a_model_is_given_what_it_takes_and_nothing_else() -> None:
    assert problems("qwen3_vl", "image", "video") == []
    assert problems("qwen3") == []
    (lacking,) = problems("qwen3_vl", "image", "audio")
    assert (lacking.path, lacking.found) == ("data.multimodal_keys", ["audio", "image"])
    assert lacking.hint.startswith("the model's family takes image, video and text; leave out audio")
    (text,) = problems("qwen3", "image", named=True)
    assert (text.path, text.hint[:36]) == ("model.modalities", "the model's family takes only text; ")


@pytest.mark.parametrize(
    ("family", "taken"),
    [
        ("qwen3_vl", {"image", "video"}),
        ("qwen3_vl_moe", {"image", "video"}),
        ("qwen3_omni_moe", {"image", "video", "audio"}),
        ("glm4v", {"image", "video"}),
        ("glm4v_moe", {"image", "video"}),
        ("glm46v", {"image", "video"}),
        ("qwen3_5", {"image"}),
    ],
)
def test_servers_take_what_the_family_names(family: str, taken: set[str]) -> None:
    """The embedded engine is the trainer's own code, and takes everything."""
    kinds = ["audio", "image", "video"]
    for engine, lacking in (("sglang", sorted(set(kinds) - taken)), ("transformers", [])):
        config: Any = SimpleNamespace(
            model=SimpleNamespace(modalities=kinds),
            rollout=SimpleNamespace(engine=engine),
            train=SimpleNamespace(engine="megatron"),
            samples=True,
            debug=SimpleNamespace(mode=None),
        )
        found = list(_rollout_engine(config, {"architectures": FAMILIES[family].architectures[:1]}, PLUGINS))
        assert [each.found for each in found] == ([lacking] if lacking else [])
        for each in found:
            assert each.path == "model.modalities"
            listed = ", ".join(sorted(taken))
            assert each.hint.startswith(f"servers of sglang take {listed} of the {family} family; write")


def mismatches(policy: str, other: str, *, kinds: tuple[str, ...] = ("image",), **vision: Any) -> list[str]:
    config: Any = SimpleNamespace(
        model=SimpleNamespace(modalities=list(kinds)),
        data=SimpleNamespace(multimodal_keys={}),
        train=SimpleNamespace(engine="megatron"),
    )
    one, another = ({**FAMILIES[name].tiny()} for name in (policy, other))
    another |= {"vision_config": {**another.get("vision_config", {}), **vision}}
    return list(media_mismatches(config, one, another, load_plugins()))


def test_a_teacher_sees_as_the_policy_does() -> None:
    assert mismatches("qwen3_vl", "qwen3_vl_moe") == []
    assert mismatches("qwen3_vl", "glm4v", kinds=()) == []
    assert mismatches("qwen3_vl", "glm4v") == [
        "a glm4v model has other media inputs than the policy, qwen3_vl"
    ]
    assert mismatches("qwen3_vl", "qwen3") == [
        "a qwen3 model has other media inputs than the policy, qwen3_vl"
    ]
    assert mismatches("qwen3_vl", "qwen3_vl", patch_size=4) == [
        "holds vision_config.patch_size = 4; model.path holds 8"
    ]


@pytest.mark.parametrize(
    ("role", "keys"), [("reference", {"kl_coef": 0.1}), ("teacher", {"distill_coef": 1.0})]
)
@pytest.mark.parametrize("modalities", [["image"], []])
def test_a_model_with_another_tower_cannot_take_turns_with_the_policy(
    tmp_path: Path, role: str, keys: dict[str, float], modalities: list[Any]
) -> None:
    """As a reference it is refused, as a teacher it has memory of its own; in a run of text nobody asks."""
    tokenizer = add_vision_tokens(tiny_tokenizer(tmp_path, alphabet="0123456789+="))
    own, other = (tiny_qwen3_vl(tmp_path / f"{n}", tokenizer, tower_layers=n) for n in (2, 3))
    config = Config.model_validate(
        {
            "run": {"name": "test"},
            "model": {"path": own, "modalities": modalities},
            "data": {"train": ["data.jsonl"]},
            "reward": {"function": "exact_match"},
            "algorithm": keys,
            role: {"path": other},
        }
    )
    plugins = load_plugins()
    problems = list(model_rules(config, plugins, trains=True))
    if modalities and role == "reference":
        (problem,) = problems
        assert (problem.path, problem.found) == ("reference.path", str(other))
        assert problem.hint == "holds vision_config = {'depth': 3}; model.path holds {'depth': 2}"
    else:
        assert problems == []
    assert is_same_model(own, other, plugins, MEGATRON, modalities) is not bool(modalities)
    assert is_same_model(own, own, plugins, MEGATRON, modalities)


def test_layers_that_get_features_are_in_the_first_part() -> None:
    (found,) = problems("qwen3_vl", "image", parallel={"pipeline": 2})
    assert (found.path, found.found) == ("train.parallel.pipeline", 2)
    assert found.hint.startswith("the first 2 layers get features and must be")
    assert "which has 1" in found.hint
    first = {"num_layers_in_first_pipeline_stage": 2}
    assert problems("qwen3_vl", "image", parallel={"pipeline": 2}, megatron=first) == []
    assert problems("glm4v", "image", parallel={"pipeline": 2}) == []
