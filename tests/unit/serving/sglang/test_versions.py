"""The table of SGLang's versions."""

from __future__ import annotations

import pytest

from anygauge.serving.sglang.versions import LISTED, find_api
from anygauge_hooks.errors import RolloutError


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23.post1", "0.5.23+local", "0.5.23post2"])
def test_a_rebuilt_release_is_the_release(version: str) -> None:
    assert find_api(version) is LISTED["0.5.23"]


def test_what_differs_between_the_listed_versions() -> None:
    old, new = find_api("0.5.17"), find_api("0.5.23")
    assert (old.begin_end, new.begin_end) == (False, True)
    assert (old.version_spans, new.version_spans) == (False, True)
    assert (old.flush_kills_waiting, new.flush_kills_waiting) == (True, False)
    assert (old.loads_adapters, new.loads_adapters) == (False, True)


@pytest.mark.parametrize(
    ("version", "nearest"),
    [("0.5.16", "0.5.17"), ("0.5.22", "0.5.17"), ("0.5.24", "0.5.23"), ("dev", "0.5.17")],
)
def test_an_unlisted_version_is_an_error_that_names_the_switch(version: str, nearest: str) -> None:
    with pytest.raises(RolloutError, match=f"SGLang {version} was not tested.*0.5.17, 0.5.23") as caught:
        find_api(version)
    assert f'rollout.sglang_version = "{nearest}"' in str(caught.value)


def test_the_switch_stands_for_unlisted_versions_alone() -> None:
    assert find_api("0.6.0", treat_as="0.5.23") is LISTED["0.5.23"]
    assert find_api("0.5.17", treat_as="0.5.23") is LISTED["0.5.17"]


def test_a_release_candidate_is_no_release() -> None:
    with pytest.raises(RolloutError, match=r"0\.5\.23rc1"):
        find_api("0.5.23rc1")
