"""The kept index: made once, never trusted blindly, never in the way."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anygauge.config.schema import Data, DataFile
from anygauge.data.cache import cache_directory
from anygauge.data.source import FileSource
from anygauge_hooks.errors import DataError

WriteRows = Callable[..., Path]
Open = Callable[..., FileSource]


class CountingTokenizer:
    """A tokenizer that knows how many texts it was given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __call__(self, texts: list[str], **options: Any) -> Any:
        self.count += len(texts)
        return self._tokenizer(texts, **options)


@pytest.fixture
def counting(tokenizer: Any) -> CountingTokenizer:
    return CountingTokenizer(tokenizer)


@pytest.fixture
def train(write_rows: WriteRows) -> Path:
    return write_rows(*({"prompt": "a" * (number % 7 + 1), "label": str(number)} for number in range(20)))


@pytest.fixture
def open_source(tmp_path: Path, counting: CountingTokenizer) -> Open:
    """Return a function that opens a source whose cache is in the test's directory."""

    def open_(path: Path | str, *, cache: Path = tmp_path / "cache", **settings: Any) -> FileSource:
        arguments = {name: settings.pop(name) for name in ("max_tokens", "stop_tokens") if name in settings}
        config = Data(train=(DataFile(path=str(path)),), cache=cache, **settings)
        return FileSource(config, counting, seed=1, **arguments)

    return open_


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache/index").iterdir())


def test_a_later_start_reads_no_row(
    open_source: Open, train: Path, counting: CountingTokenizer, tmp_path: Path
) -> None:
    first = open_source(train, max_prompt_tokens=6)
    assert counting.count == 20
    later = open_source(train, max_prompt_tokens=6)
    assert counting.count == 20
    assert (len(later), later.num_dropped) == (len(first), first.num_dropped) == (15, 5)
    assert later.all() == first.all()
    assert later.state_dict() == first.state_dict()
    assert [sorted(path.name for path in directory.iterdir()) for directory in kept(tmp_path)] == [
        ["index.json", "rows.bin", "use"]
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {"label_key": None},
        {"input_key": "label"},
        {"max_prompt_tokens": 5},
        {"max_tokens": 100},
        {"apply_chat_template": True},
        {"apply_chat_template": True, "system_prompt": "Hi"},
        {"apply_chat_template": True, "chat_template_kwargs": {"thinking": True}},
        {"apply_chat_template": True, "stop_tokens": ["\n"]},
    ],
)
def test_what_decides_over_rows_is_part_of_the_key(
    open_source: Open, train: Path, counting: CountingTokenizer, settings: dict[str, Any]
) -> None:
    open_source(train)
    open_source(train, apply_chat_template=True)
    counting.count = 0
    if settings != {"apply_chat_template": True}:
        open_source(train, **settings)
        assert counting.count >= 20
    counting.count = 0
    open_source(train, **settings)
    assert counting.count == 0


def test_what_does_not_is_not(open_source: Open, train: Path, counting: CountingTokenizer) -> None:
    open_source(train)
    open_source(train, shuffle=False)
    assert counting.count == 20


def test_slices_have_indexes_of_their_own(
    open_source: Open, train: Path, counting: CountingTokenizer
) -> None:
    assert [len(open_source(f"{train}@[{rows}]")) for rows in (":5", "5:", ":5")] == [5, 15, 5]
    assert counting.count == 20


def test_another_template_or_tokenizer(
    open_source: Open, train: Path, counting: CountingTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_source(train, apply_chat_template=True)
    monkeypatch.setattr(counting._tokenizer, "chat_template", "{{ messages[0]['content'] }}")
    assert [prompt.text for prompt in open_source(train, apply_chat_template=True).all(2)] == ["a", "aa"]


def test_added_tokens_make_another_tokenizer(train: Path, tokenizer: Any, tmp_path: Path) -> None:
    from copy import deepcopy

    config = Data(train=(DataFile(path=str(train)),), cache=tmp_path / "cache")
    other = deepcopy(tokenizer)
    other.add_tokens(["aa"])
    lengths = [[len(prompt.tokens) for prompt in FileSource(config, t).all()] for t in (tokenizer, other)]
    assert lengths[0] != lengths[1]
    assert len(kept(tmp_path)) == 2


def test_a_file_that_changed_is_read_again(open_source: Open, train: Path, write_rows: WriteRows) -> None:
    open_source(train)
    before = train.stat()
    write_rows(*({"prompt": "b", "label": ""} for _ in range(3)))
    os.utime(train, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert [prompt.text for prompt in open_source(train).all()] == ["b", "b", "b"]


def test_bad_rows_are_reported_at_every_start(open_source: Open, write_rows: WriteRows) -> None:
    path = write_rows({"prompt": "a", "label": ""}, "{")
    for _ in range(2):
        with pytest.raises(DataError, match=r"1 of 2 rows cannot be used:\n.*train\.jsonl:2: is not JSON"):
            open_source(path)


@pytest.mark.parametrize("name", ["rows.bin", "index.json"])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "missing", "folder"])
def test_a_damaged_index_is_made_anew(
    open_source: Open,
    train: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    damage: str,
) -> None:
    expected = open_source(train).all()
    file = kept(tmp_path)[0] / name
    content = file.read_bytes()
    file.unlink()
    if damage == "folder":
        file.mkdir()
    elif damage != "missing":
        changed = {"truncated": content[:-3], "flipped": bytes([content[0] ^ 1]) + content[1:], "empty": b""}
        file.write_bytes(changed[damage])
    assert open_source(train).all() == expected
    assert f"rebuilding the index of {train}" in caplog.text
    caplog.clear()
    assert open_source(train).all() == expected
    assert not caplog.messages


@pytest.mark.parametrize("obstacle", ["file", "read-only", "full"])
def test_a_cache_that_cannot_be_written_is_a_warning(
    open_source: Open,
    train: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    obstacle: str,
) -> None:
    cache = tmp_path / "obstacle"
    if obstacle == "file":
        cache.write_text("")
    else:
        cache.mkdir()
        method = "mkdir" if obstacle == "read-only" else "open"
        refuse_below(cache, method, monkeypatch)
    source = open_source(train, cache=cache)
    assert [prompt.label for prompt in source.all(2)] == ["0", "1"]
    assert f"the index cache {cache}/index cannot be written" in caplog.text
    outside = source._files[0].rows.filename.parent
    assert outside.is_dir()
    del source
    assert not outside.exists()


def refuse_below(folder: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a method of paths fail inside a folder, as on a full or read-only disk; root may write anywhere."""
    original = getattr(Path, method)

    def refusing(self: Path, *arguments: Any, **options: Any) -> Any:
        if folder in self.parents:
            raise OSError(28, "No space left on device")
        return original(self, *arguments, **options)

    monkeypatch.setattr(Path, method, refusing)


def test_no_place_at_all(
    open_source: Open, train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    (tmp_path / "cache").write_text("")
    with pytest.raises(DataError, match=r"data index cannot be written: .*No such file"):
        open_source(train)


def test_a_tokenizer_that_cannot_be_told_apart_is_never_cached(train: Path, tmp_path: Path) -> None:
    def characters(texts: list[str], **options: Any) -> Any:
        return {"input_ids": [[ord(char) for char in text] for text in texts]}

    source = FileSource(Data(train=(DataFile(path=str(train)),), cache=tmp_path / "cache"), characters)
    assert len(source.next(3)) == 3
    assert [path.name.startswith(".making-") for path in kept(tmp_path)] == [True]
    del source
    assert kept(tmp_path) == []


def test_starts_at_the_same_time(open_source: Open, train: Path, tmp_path: Path) -> None:
    found: list[Any] = []
    barrier = threading.Barrier(4)

    def start() -> None:
        barrier.wait()
        found.append(open_source(train).next(5))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(prompts == found[0] for prompts in found)
    assert [path.name.startswith(".") for path in kept(tmp_path)] == [False]


def test_what_a_killed_run_left_is_swept_away(open_source: Open, train: Path, tmp_path: Path) -> None:
    old, new = (tmp_path / "cache/index" / f".making-{name}" for name in ("old", "new"))
    for path in (old, new):
        path.mkdir(parents=True)
        (path / "rows.bin").touch()
    long_ago = time.time() - 100_000
    for path in (old / "rows.bin", old):
        os.utime(path, (long_ago, long_ago))
    open_source(train)
    assert (old.exists(), new.exists()) == (False, True)


def make_old(directory: Path, days: float) -> None:
    """Let a directory of the cache look as if nobody had used it for so long."""
    past = time.time() - days * 86_400
    for path in (*directory.iterdir(), directory):
        os.utime(path, (past, past))


def test_an_index_that_nobody_used_for_a_month_is_deleted(
    open_source: Open, train: Path, tmp_path: Path
) -> None:
    for rows in (":3", ":4"):
        open_source(f"{train}@[{rows}]")
    foreign = tmp_path / "cache/index/notes"
    foreign.mkdir()
    for path in kept(tmp_path):
        make_old(path, days=31)
    open_source(f"{train}@[:3]")  # reads one of them
    used = max(
        kept(tmp_path), key=lambda path: max((each.stat().st_mtime for each in path.glob("use")), default=0)
    )
    make_old(used, days=29)
    open_source(f"{train}@[:5]")  # makes a new one
    assert len(kept(tmp_path)) == 3
    assert {used, foreign} < set(kept(tmp_path))


@pytest.mark.parametrize("ends", [False, True])
def test_what_a_run_uses_is_not_deleted(open_source: Open, train: Path, tmp_path: Path, ends: bool) -> None:
    running = open_source(train)
    (index,) = kept(tmp_path)
    make_old(index, days=400)
    if ends:
        del running
    open_source(f"{train}@[:5]")
    assert index.exists() is not ends


def test_the_workspace_of_a_long_run_is_not_deleted(
    open_source: Open, train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("anygauge.data.cache.IndexCache.keep", lambda self, workspace, key: workspace)
        running = open_source(train)
    (workspace,) = kept(tmp_path)
    make_old(workspace, days=2)
    open_source(f"{train}@[:5]")
    assert workspace.exists()
    del running
    assert not workspace.exists()


def test_an_index_that_is_being_deleted_is_made_anew(open_source: Open, train: Path, tmp_path: Path) -> None:
    expected = open_source(train).all()
    (index,) = kept(tmp_path)
    with (index / "use").open() as use:
        fcntl.flock(use, fcntl.LOCK_EX)
        assert open_source(train).all() == expected
    assert open_source(train).all() == expected


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_directory(tmp_path) == tmp_path / "index"
    monkeypatch.setenv("ANYGAUGE_CACHE", str(tmp_path / "a"))
    assert cache_directory(None) == tmp_path / "a/index"
    monkeypatch.delenv("ANYGAUGE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_directory(None) == tmp_path / "home/.cache/anygauge/index"


def test_a_row_that_changed_behind_an_unchanged_length(open_source: Open, train: Path) -> None:
    source = open_source(train, shuffle=False)
    content = train.read_bytes()
    train.write_bytes(content.replace(b'"1"', b'"8"'))
    assert source.next(1)[0].label == "0"
    with pytest.raises(DataError, match=r"train\.jsonl:2: the row has changed since the start"):
        source.next(1)


def test_a_file_may_grow_during_a_run(open_source: Open, train: Path) -> None:
    source = open_source(train, shuffle=False)
    with train.open("a") as stream:
        stream.write(json.dumps({"prompt": "new", "label": ""}) + "\n")
    assert [prompt.label for prompt in source.next(21)] == [*map(str, range(20)), "0"]


def test_no_file_stays_open(open_source: Open, train: Path) -> None:
    source = open_source(train)
    source.next(3)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        source.next(3)
        open_source(train)
    assert len(os.listdir("/proc/self/fd")) == before
