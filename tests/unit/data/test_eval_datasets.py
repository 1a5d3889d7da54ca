"""Evaluation data sets: the shorthand and the table in one, with what they leave out filled in."""

from __future__ import annotations

from typing import Any

from anygauge.config import Config
from anygauge.config.schema import DataFile, EvalDataset
from anygauge.data.evaluation import eval_data, eval_datasets
from anygauge.trainer.generation import eval_params


def config(evaluation: dict[str, Any], **data: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "x"},
            "model": {"path": "m"},
            "data": {"train": ["t.jsonl"], **data},
            "rollout": {"max_new_tokens": 77},
            "reward": {"function": "math"},
            "eval": evaluation,
        }
    )


def test_none() -> None:
    assert eval_datasets(config({})) == {}


def test_what_is_left_out_comes_from_the_section() -> None:
    table = {"data": ["a/easy.jsonl@[:10]"], "samples_per_prompt": 4, "top_k": 5, "max_prompts": 30}
    found = eval_datasets(config(table, input_key="question"))["easy"]
    assert found.files == (DataFile(path="a/easy.jsonl@[:10]", name="easy"),)
    assert (found.samples_per_prompt, found.temperature, found.top_p, found.top_k) == (4, 1.0, 1.0, 5)
    assert (found.max_prompts, found.max_new_tokens) == (30, 77)
    assert (found.input_key, found.label_key, found.reward) == ("question", "label", None)


def test_what_a_data_set_says_is_kept() -> None:
    own = {
        "files": ["a.jsonl", {"path": "b.parquet", "name": "other"}],
        "temperature": 0.0,
        "top_k": 0,
        "input_key": "q",
        "max_new_tokens": 3,
        "reward": {"function": "exact_match"},
    }
    table = {"data": ["easy.jsonl"], "datasets": {"hard": own}, "top_k": 9, "max_new_tokens": 5}
    found = eval_datasets(config(table))
    assert list(found) == ["easy", "hard"]
    assert (found["easy"].max_new_tokens, found["hard"].max_new_tokens) == (5, 3)
    assert (found["hard"].temperature, found["hard"].top_k, found["hard"].input_key) == (0.0, 0, "q")
    assert [file.name for file in found["hard"].files] == ["hard", "hard"]
    assert found["hard"].reward is not None


def test_files_of_one_name_are_one_data_set() -> None:
    files = [{"path": f"{letter}.jsonl", "name": "both"} for letter in "ab"]
    (found,) = eval_datasets(config({"data": files})).values()
    assert [file.path for file in found.files] == ["a.jsonl", "b.jsonl"]


def test_its_files_are_read_in_order_with_its_keys() -> None:
    loaded = config(
        {"datasets": {"hard": {"files": ["e.jsonl"], "label_key": "answer"}}},
        input_key="question",
        system_prompt="Hi",
        apply_chat_template=True,
    )
    data = eval_data(loaded, eval_datasets(loaded)["hard"])
    assert data.train == (DataFile(path="e.jsonl", name="hard"),)
    assert (data.input_key, data.label_key, data.shuffle, data.system_prompt) == (
        "question",
        "answer",
        False,
        "Hi",
    )


READING: dict[str, Any] = {
    "input_key": "question",
    "label_key": "gold",
    "metadata_key": "extra",
    "tools_key": "functions",
    "multimodal_keys": {"image": "images"},
    "apply_chat_template": True,
    "chat_template_kwargs": {"thinking": True},
    "system_prompt": "Hi",
    "max_prompt_tokens": 9,
}
OTHER: dict[str, Any] = {
    "input_key": "problem",
    "label_key": None,
    "metadata_key": None,
    "tools_key": None,
    "multimodal_keys": {"video": "clip"},
    "chat_template_kwargs": {},
    "system_prompt": None,
    "max_prompt_tokens": None,
}


def only(own: dict[str, Any]) -> tuple[Config, EvalDataset]:
    loaded = config({"datasets": {"e": {"files": ["e.jsonl"], **own}}, "max_prompts": 5}, **READING)
    rollout = loaded.rollout.model_copy(update={"stop": ("X",), "stop_token_ids": (3,)})
    loaded = loaded.model_copy(update={"rollout": rollout})
    return loaded, eval_datasets(loaded)["e"]


def test_each_way_of_reading_is_inherited_or_its_own() -> None:
    for own in ({}, *({key: value} for key, value in OTHER.items())):
        assert eval_data(*only(own)).model_dump(include=set(READING)) == READING | own
    meaningless = {"input_key": None, "apply_chat_template": None}
    assert eval_data(*only(meaningless)).model_dump(include=set(READING)) == READING


def test_each_stop_is_inherited_or_its_own() -> None:
    params = eval_params(only({})[1])
    assert (params.stop, params.stop_token_ids) == (("X",), (3,))
    params = eval_params(only({"stop": ["Y", "Z"], "stop_token_ids": []})[1])
    assert (params.stop, params.stop_token_ids) == (("Y", "Z"), ())


def test_none_that_is_written_is_no_limit() -> None:
    assert only({})[1].max_prompts == 5
    assert only({"max_prompts": None})[1].max_prompts is None


def test_without_a_template_its_settings_are_not_inherited() -> None:
    data = eval_data(*only({"apply_chat_template": False}))
    assert (data.tools_key, data.system_prompt, data.chat_template_kwargs) == (None, None, {})
    assert (data.metadata_key, data.max_prompt_tokens) == ("extra", 9)


def test_what_was_left_out_stays_so_when_it_is_written_and_read() -> None:
    for own in ({}, {"label_key": None}):
        loaded, found = only(own)
        assert eval_datasets(Config.model_validate(loaded.model_dump()))["e"] == found
