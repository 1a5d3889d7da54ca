"""Contents in shared memory: one file for all processes, gone with the run, however it ends."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from anygauge.config.schema import Media as Settings
from anygauge.data.media import store as stores
from anygauge.data.media.loader import MediaLoader
from anygauge.data.media.store import FileStore, MappedFiles, sweep
from anygauge_hooks.errors import MediaError, OutOfMemoryError
from anygauge_hooks.media import Content, Media
from anygauge_hooks.rl import Prompt


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let a folder stand for the host's shared memory."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(stores, "MEMORY", folder)
    return folder


def content(value: int = 7, kind: Any = "image") -> Content:
    return Content(kind, np.full((4, 6, 3), value, np.uint8), 0.5)


def test_a_content_comes_back_as_it_was_and_cannot_be_written(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "run" / "media")
    sound = Content("audio", np.arange(6, dtype=np.float32).reshape(2, 3).T)
    store.put("a", content())
    store.put("b", sound)
    store.put("a", content(9))
    seen = MappedFiles(tmp_path / "run" / "media")
    assert (seen.get("a").kind, seen.get("a").seconds) == ("image", 0.5)
    assert np.array_equal(seen.get("a").data, content().data)
    assert np.array_equal(seen.get("b").data, sound.data)
    assert store.bytes() == 72 + 24
    with pytest.raises(ValueError, match="read-only"):
        seen.get("a").data[0] = 1
    held = seen.get("a").data
    store.drop(["a", "none"])
    assert held[0, 0, 0] == 7
    assert (store.has("a"), seen.bytes()) == (False, 24)
    with pytest.raises(KeyError):
        seen.get("a")
    store.close()


def test_another_process_maps_the_same_file_and_a_closed_store_leaves_nothing(
    tmp_path: Path, memory: Path
) -> None:
    store = FileStore(tmp_path / "run" / "media")
    store.put("a", content())
    child = os.fork()
    if not child:
        seen = MappedFiles(tmp_path / "run" / "media").get("a").data
        mapped = any(str(memory) in line for line in Path("/proc/self/maps").read_text().splitlines())
        os._exit(0 if mapped and seen.sum() == 7 * 72 else 1)
    assert os.waitpid(child, 0)[1] == 0
    store.close()
    store.close()
    assert list(memory.iterdir()) == []
    assert not (tmp_path / "run" / "media").is_symlink()


def test_what_a_killed_run_leaves_is_removed_by_the_next_and_what_lives_is_not(
    tmp_path: Path, memory: Path
) -> None:
    living = FileStore(tmp_path / "living")
    living.put("a", content())
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        FileStore(tmp_path / "killed").put("a", content())
        os.write(writer, b".")
        signal.pause()
    os.read(reader, 1)
    assert len(list(memory.iterdir())) == 2
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    again = FileStore(tmp_path / "killed")
    assert again.bytes() == 0
    assert len(list(memory.iterdir())) == 2
    again.close()
    sweep(memory)
    assert living.bytes() == 72
    living.close()
    os.close(reader)
    os.close(writer)


def test_a_host_without_shared_memory_keeps_contents_in_the_runs_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stores, "MEMORY", tmp_path / "none")
    store = FileStore(tmp_path / "run" / "media")
    store.put("a", content())
    assert MappedFiles(tmp_path / "run" / "media").bytes() == 72
    assert "kept on disk" in caplog.text
    store.close()
    assert not (tmp_path / "run" / "media").exists()


def fill(monkeypatch: pytest.MonkeyPatch, *full: Path) -> None:
    """Let folders have no room left."""
    real = stores._write

    def write(path: Path, content: Content) -> None:
        if path.resolve().parent in [folder.resolve() for folder in full]:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        real(path, content)

    monkeypatch.setattr(stores, "_write", write)


def test_what_shared_memory_has_no_room_for_goes_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    link = tmp_path / "run" / "media"
    store = FileStore(link)
    store.put("a", content(1))
    fill(monkeypatch, link)
    store.put("b", content(2))
    store.put("c", content(3))
    assert [path.name for path in link.iterdir() if path.name != "owner"] == ["a"]
    seen = MappedFiles(link)
    assert [int(seen.get(key).data[0, 0, 0]) for key in "abc"] == [1, 2, 3]
    assert (seen.bytes(), store.bytes()) == (3 * 72, 3 * 72)
    assert caplog.text.count("further decoded media are kept in") == 1
    store.drop(["b"])
    assert (seen.has("b"), seen.has("c"), seen.bytes()) == (False, True, 2 * 72)
    store.close()
    assert list((tmp_path / "run").iterdir()) == []


def test_what_a_killed_run_left_on_disk_is_removed_by_its_next(tmp_path: Path) -> None:
    left = tmp_path / "media-on-disk"
    left.mkdir()
    (left / "a").write_bytes(b"")
    store = FileStore(tmp_path / "media")
    assert not store.has("a")
    store.close()


def test_a_full_store_and_disk_say_what_is_held_where_and_what_to_do(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path / "media")
    store.put("a", content())
    fill(monkeypatch, tmp_path / "media", tmp_path / "media-on-disk")
    words = (
        rf"72 bytes of a decoded image: No space left on device\. {memory}.* and {tmp_path}.* hold 72 bytes"
    )
    with pytest.raises(OutOfMemoryError, match=rf"{words}.*\n.*--shm-size"):
        store.put("b", content())
    assert [path.name for path in (tmp_path / "media-on-disk").iterdir()] == []
    assert store.bytes() == 72
    store.close()


# -------------------------------------------------------------------------
# Who holds what
# -------------------------------------------------------------------------


class Reader:
    """Decodes on command."""

    def __init__(self) -> None:
        self.settings = Settings()
        self.left_out: list[str] = []
        self.decoded: list[str] = []
        self.go_on = threading.Event()
        self.go_on.set()

    def content(self, key: str) -> Content:
        self.go_on.wait()
        self.decoded.append(key)
        if key == "broken":
            raise MediaError("cannot be decoded.")
        return content()


def prompt(*keys: str) -> Prompt:
    media = tuple(Media(kind="image", key=key, spans=((0, 1),), grid=(1, 2, 2)) for key in keys)
    return Prompt(index=0, tokens=(1,), text="", media=media)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[SimpleNamespace]:
    store, reader = FileStore(tmp_path / "media"), Reader()
    loader = MediaLoader(store, reader)  # type: ignore[arg-type]
    yield SimpleNamespace(store=store, reader=reader, loader=loader)
    loader.close()


def test_prompts_that_show_the_same_decode_it_once_and_the_last_lets_go(opened: SimpleNamespace) -> None:
    first, second = prompt("a", "b", "a"), prompt("b", "c")
    assert opened.loader.load([first, second]) == [None, None]
    assert sorted(opened.reader.decoded) == ["a", "b", "c"]
    assert opened.store.bytes() == 3 * 72
    del first
    assert [opened.store.has(key) for key in "abc"] == [False, True, True]
    del second
    assert opened.store.bytes() == 0
    assert opened.loader.metrics()["data/media_decode_s"] > 0
    assert opened.loader.metrics()["data/media_decode_s"] == 0


def test_what_fails_is_told_and_the_rest_is_there(opened: SimpleNamespace) -> None:
    good, bad = prompt("a"), prompt("broken", "b")
    failures = opened.loader.load([good, bad])
    assert failures[0] is None
    assert isinstance(failures[1], MediaError)
    del bad, failures
    gc.collect()
    assert opened.store.bytes() == 72


def test_a_content_that_is_let_go_while_it_is_decoded_does_not_stay(opened: SimpleNamespace) -> None:
    opened.reader.go_on.clear()
    shown = prompt("a")
    opened.loader._acquire(["a"], shown)
    del shown
    opened.reader.go_on.set()
    opened.loader._pool.shutdown()
    assert opened.reader.decoded == ["a"]
    assert opened.store.bytes() == 0


def test_holding_and_letting_go_in_many_threads_leaves_nothing(opened: SimpleNamespace) -> None:
    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(30):
            own = prompt(*(str(key) for key in rng.integers(0, 4, 2)))
            assert opened.loader.load([own]) == [None]
            assert all(opened.store.has(each.key) for each in own.media)
            del own

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not opened.loader._holders
    assert opened.store.bytes() == 0
    assert not opened.loader._under_way


@pytest.mark.parametrize("full", [False, True])
def test_media_are_readable_by_their_user_alone(
    full: bool, tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.umask(0)
    try:
        store = FileStore(tmp_path / "run" / "media")
        (folder,) = memory.iterdir()
        if full:
            monkeypatch.setattr(stores, "_put", fails_once(stores._put))
        store.put("a", content())
    finally:
        os.umask(before)
    kept = tmp_path / "run" / "media-on-disk" if full else folder
    assert {path: path.stat().st_mode & 0o777 for path in (folder, kept, kept / "a")} == {
        folder: 0o700,
        kept: 0o700,
        kept / "a": 0o600,
    }
    store.close()


def fails_once(put: Any) -> Any:
    calls = iter([OSError(28, "No space left on device")])

    def once(*arguments: Any) -> None:
        for error in calls:
            raise error
        put(*arguments)

    return once
