"""Hostile images, videos, recordings and URLs are errors of media, in bounded memory and time."""

from __future__ import annotations

import io
import json
import re
import socket
import struct
import subprocess
import sys
import threading
import wave
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self
from unittest.mock import Mock, patch

import numpy as np
import pytest
from PIL import Image
from PIL.GifImagePlugin import GifImageFile

from anygauge.config.schema import Media as Settings
from anygauge.data.media import audio, video
from anygauge.data.media import fetch as fetching
from anygauge.data.media.contents import header_of
from anygauge.data.media.decode import as_pixels
from anygauge.data.media.fetch import fetch, is_public
from anygauge.data.media.sources import Source
from anygauge_hooks.errors import MediaError

ATTACKS = Path(__file__).parent / "programs" / "media_attacks.py"
RATE = "has .* samples per second, a rate that cannot be resampled"
PIXELS = r"is \d+x\d+ pixels; media.max_image_pixels allows 50000000"
FRAMES = r"has \d+ frames of \d+x\d+ pixels; media.max_video_pixels allows 20000000000"
BYTES = r"has [\d.]+ MiB; media.max_bytes allows 64.0"
QUICK = {
    "wav 0": RATE,
    "wav 192001": RATE,
    "wav 500009": RATE,
    "wav 1000003": RATE,
    "wav 2**32 - 1": RATE,
    "wav 2**31": RATE,
    "wav 384000": "16000 samples of 1 s",
    "wav 65519": "16000 samples of 1 s",
    "wav 1": "320000 samples of 20 s",
    "wav claims 4 GiB": "is a recording of 44739.2 seconds",
    "wav grew": "is a recording of 31.0 seconds",
    "wav of 65535 channels": "200 samples of 0.0125 s",
    "png": PIXELS,
    "tiff of one large tile": "is an image in tiles of 16384x16384 pixels",
    "tiff of one tile": "16x16",
    "icon": "is not in a supported image format",
    "jpeg": PIXELS,
    "jpeg of many scans": r"is a JPEG file of \d+ scans; at most 500 are read",
    "jpeg of some scans": "64x64",
    "webp": PIXELS,
    "webp of one image": PIXELS,
    "apng": FRAMES,
    "apng without its frames": "cannot be decoded",
    "gif": FRAMES,
    "gif that grows": r"has frames of different sizes: \(16, 16\) and \(9000, 9000\)",
    "gif that grew": PIXELS,
    "base64": BYTES,
    "data": BYTES,
    "spaces": "cannot be looked at: File name too long",
}
HEAVY = {
    "largest png": "7000x7000",
    "largest transparent png": "7000x7000",
    "64 large frames": "64 of 64 frames",
    "whole file of wav": "480000 samples of 30 s",
}


def outcomes(which: str) -> dict[str, str]:
    """Return what each attack led to in a process that may have 1 GiB for them."""
    command = [sys.executable, "-W", "ignore", str(ATTACKS), which]
    answer = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, str] = json.loads(answer.stdout)
    return found


def wrong(found: dict[str, str], wanted: dict[str, str]) -> dict[str, str]:
    assert found.keys() == wanted.keys()
    return {name: text for name, text in found.items() if not re.match(wanted[name], text)}


def test_media_that_would_fill_the_memory_are_refused() -> None:
    assert not wrong(outcomes("quick"), QUICK)


@pytest.mark.soak
def test_the_largest_media_that_are_taken_fit_in_1_gib() -> None:
    assert not wrong(outcomes("heavy"), HEAVY)


def test_too_little_memory_is_an_error_of_media(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as sound:
        sound.setparams((1, 2, 8_000, 0, "NONE", ""))
        sound.writeframes(bytes(64))
    monkeypatch.setattr(audio, "resampled", Mock(side_effect=MemoryError))
    with pytest.raises(MediaError, match="cannot be decoded: MemoryError"):
        audio.decode_audio(Source("a.wav", Settings(), raw=buffer.getvalue()))


class Compressed:
    """A recording as soundfile gives it, which is read in parts alone."""

    samplerate, frames = 16_000, 40_000

    def __init__(self, channels: int) -> None:
        self.channels = channels
        self.samples = np.random.default_rng(0).normal(size=(self.frames, channels)).astype(np.float32)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def blocks(self, size: int, *, dtype: str, always_2d: bool) -> Iterator[Any]:
        assert (dtype, always_2d) == ("float32", True)
        assert size <= 2**16
        return (self.samples[at : at + size] for at in range(0, self.frames, size))


def test_compressed_channels_are_averaged_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """30 s of silence in 255 channels are an OGG file of 52 KB, and took 1.4 GB."""

    def decoded(sound: Compressed) -> Any:
        monkeypatch.setattr(audio, "_soundfile", lambda: SimpleNamespace(SoundFile=lambda _: sound))
        return audio.decode_audio(Source("a.ogg", Settings(), raw=b"OggS")).samples

    with pytest.raises(MediaError, match="has 255 channels; at most 64 are read"):
        decoded(Compressed(255))
    for channels in (1, 2, 64):
        sound = Compressed(channels)
        assert np.array_equal(decoded(sound), sound.samples.mean(1))


def test_what_is_transparent_is_put_on_white_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once, a WebP file of 2 KB took 1.26 GB."""
    shades = np.random.default_rng(0).integers(0, 256, (600, 30, 4), dtype=np.uint8)
    image = Image.fromarray(shades)
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    expected = np.array(Image.alpha_composite(white, image).convert("RGB"))
    composite, heights = Image.alpha_composite, []

    def watched(under: Image.Image, over: Image.Image) -> Image.Image:
        heights.append(over.height)
        return composite(under, over)

    monkeypatch.setattr(Image, "alpha_composite", watched)
    assert np.array_equal(as_pixels(image), expected)
    assert heights == [256, 256, 88]


def test_an_animation_of_very_many_frames_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GIF file of 64 MiB may have four million, which take minutes."""
    head = b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + bytes(6)
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\0"
    monkeypatch.setattr(video, "_MOST_FRAMES", 20)
    header = video.video_header(Source("a.gif", Settings(), raw=head + 20 * frame + b";"))
    assert (header.frames, header.size) == (20, (1, 1))
    with (
        patch.object(GifImageFile, "_seek", autospec=True, side_effect=GifImageFile._seek) as seek,
        pytest.raises(MediaError, match="is an animation of more than 20 frames"),
    ):
        video.video_header(Source("a.gif", Settings(), raw=head + 1000 * frame + b";"))
    assert seek.call_count < 30


@pytest.mark.parametrize("kind", [b"P1", b"P2", b"P3"])
def test_a_picture_that_pillow_decodes_in_python_is_refused(kind: bytes) -> None:
    """It takes minutes, and hours where the text has comments."""
    data = kind + b"\n2 1\n" + (b"" if kind == b"P1" else b"255\n") + b"#\n1 1 1 1 1 1\n"
    with pytest.raises(MediaError, match="is a PPM file in text"):
        header_of("image", Source("a.ppm", Settings(), raw=data))
    head = struct.pack("<IiiHHIIiiII", 40, 2, 1, 1, 8, 1, 4, 0, 0, 256, 0) + bytes(1024)
    data = b"BM" + struct.pack("<IHHI", 18 + len(head), 0, 0, 14 + len(head)) + head + b"\x02\x01\0\x01"
    with pytest.raises(MediaError, match="a compressed BMP file"):
        header_of("image", Source("a.bmp", Settings(), raw=data))
    assert header_of("image", Source("a.ppm", Settings(), raw=b"P6\n2 1\n255\n" + bytes(6))).size == (1, 2)


LISTS = {
    "sdp": b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\n"
    b"a=rtpmap:96 H264/90000\n",
    "hls": b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nhttp://127.0.0.1:9/a.ts\n#EXT-X-ENDLIST\n",
    "concat": b"ffconcat version 1.0\nfile http://127.0.0.1:9/a.ts\n",
}


@pytest.mark.parametrize("name", LISTS)
def test_a_list_of_other_files_is_no_video(name: str) -> None:
    """FFmpeg would fetch what is in it, from any host, and listen for it."""
    pytest.importorskip("av")
    with pytest.raises(MediaError, match=r"cannot be decoded: .*Invalid (argument|data)"):
        header_of("video", Source(name, Settings(), raw=LISTS[name]))


# -------------------------------------------------------------------------
# Addresses
# -------------------------------------------------------------------------

PUBLIC, PRIVATE = "127.0.0.1", "127.0.0.2"
"""Both are of this host; tests take the first one for public."""
Respond = Callable[[BaseHTTPRequestHandler], None]


class Site:
    """Two servers of one behavior, and what they were asked."""

    def __init__(self, respond: Respond) -> None:
        self.asked: list[tuple[str, str]] = []
        self.closing = threading.Event()
        site = self

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                site.asked.append((self.server.server_address[0], self.path))
                self.closing = site.closing
                respond(self)

            def log_message(self, *_: Any) -> None:
                pass

        public = ThreadingHTTPServer((PUBLIC, 0), Answer)
        self.port = public.server_port
        self.servers = [public, ThreadingHTTPServer((PRIVATE, self.port), Answer)]
        self.threads = [threading.Thread(target=each.serve_forever, args=(0.01,)) for each in self.servers]
        for thread in self.threads:
            thread.start()

    def at(self, host: str, path: str = "/") -> str:
        return f"http://{host}:{self.port}{path}"

    def close(self) -> None:
        self.closing.set()
        for server, thread in zip(self.servers, self.threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()


@pytest.fixture
def start() -> Iterator[Callable[[Respond], Site]]:
    sites: list[Site] = []
    yield lambda respond: sites.append(Site(respond)) or sites[-1]  # type: ignore[func-returns-value]
    for site in sites:
        site.close()


@pytest.fixture
def _one_is_public(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "is_public", lambda address: address == PUBLIC)


def settings(**changes: Any) -> Settings:
    return Settings(**{"allow_urls": True, **changes})


def answered(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(b"bytes")


def redirected(handler: BaseHTTPRequestHandler) -> None:
    """Lead to what follows the first slash."""
    if handler.path == "/":
        return answered(handler)
    handler.send_response(302)
    handler.send_header("Location", handler.path[1:])
    handler.end_headers()
    return None


def drip(handler: BaseHTTPRequestHandler, first: bytes, piece: bytes) -> None:
    """Send a piece every 20 ms, and never come to an end."""
    handler.connection.sendall(first)
    try:
        while not handler.closing.wait(0.02):  # type: ignore[attr-defined]
            handler.connection.sendall(piece)
    except OSError:  # the other side has had enough
        pass


ENDLESS = {
    "status": (b"", b"H"),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"x"),
    "more headers": (b"HTTP/1.1 200 OK\r\n", b"a: b\r\n"),
    "body": (b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n", b"x"),
    "chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
    "redirects": (b"HTTP/1.1 302 Found\r\nLocation: /\r\n", b"x"),
}


@pytest.mark.parametrize("how", ENDLESS)
def test_an_address_that_never_ends_is_given_up_in_time(how: str, start: Callable[[Respond], Site]) -> None:
    site = start(lambda handler: drip(handler, *ENDLESS[how]))
    with pytest.raises(MediaError, match=r"cannot be fetched within 0.2 s: (timed out|4.. )"):
        fetch(site.at(PUBLIC), settings(allow_private_urls=True, timeout_s=0.2))


def test_a_server_that_accepts_and_is_silent_is_given_up_in_time() -> None:
    with socket.create_server((PUBLIC, 0)) as server:
        for scheme in ("http", "https"):
            address = f"{scheme}://{PUBLIC}:{server.getsockname()[1]}/"
            with pytest.raises(MediaError, match="timed out"):
                fetch(address, settings(allow_private_urls=True, timeout_s=0.2))


def test_a_name_server_that_is_silent_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def silent(*_: Any, **__: Any) -> Any:
        over.wait()
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    try:
        with pytest.raises(MediaError, match="timed out"):
            fetch("http://images.example/", settings(timeout_s=0.2))
    finally:
        over.set()


ADDRESSES = {
    **dict.fromkeys(("8.8.8.8", "2001:4860:4860::8888", "64:ff9b::808:808"), True),
    **dict.fromkeys(("127.0.0.1", "127.9.9.9", "0.0.0.0", "::1", "::", "::ffff:127.0.0.1"), False),
    **dict.fromkeys(("10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1", "fd00::1"), False),
    **dict.fromkeys(("169.254.169.254", "100.100.100.200", "fd00:ec2::254", "fe80::1%eth0"), False),
    **dict.fromkeys(("::127.0.0.1", "::ffff:0:127.0.0.1", "64:ff9b:1::7f00:1", "fec0::1"), False),
    **dict.fromkeys(("168.63.129.16", "::ffff:168.63.129.16"), False),
    **dict.fromkeys(("64:ff9b::a9fe:a9fe", "2002:7f00:1::", "224.0.0.1", "255.255.255.255"), False),
}


@pytest.mark.parametrize("address", ADDRESSES)
def test_addresses_of_this_host_and_of_private_networks_are_known(address: str) -> None:
    assert is_public(address) == ADDRESSES[address]


@pytest.mark.parametrize("host", [PUBLIC, PRIVATE, "localhost", "[::ffff:127.0.0.1]", "0.0.0.0", "0x7f.1"])
def test_what_leads_to_this_host_is_refused(host: str, start: Callable[[Respond], Site]) -> None:
    site = start(answered)
    with pytest.raises(MediaError, match=r"leads to .*, which is not a public address.*\n.*allow_private"):
        fetch(site.at(host), settings())
    assert not site.asked
    if host == PUBLIC:
        assert fetch(site.at(host), settings(allow_private_urls=True)) == b"bytes"


@pytest.mark.usefixtures("_one_is_public")
def test_a_redirect_to_what_is_not_public_is_refused(start: Callable[[Respond], Site]) -> None:
    site = start(redirected)
    assert fetch(site.at(PUBLIC, f"/{site.at(PUBLIC)}"), settings()) == b"bytes"
    with pytest.raises(MediaError, match=f"leads to {PRIVATE}, which is not a public address"):
        fetch(site.at(PUBLIC, f"/{site.at(PRIVATE)}"), settings())
    assert [host for host, _ in site.asked] == [PUBLIC] * 3
    assert fetch(site.at(PUBLIC, f"/{site.at(PRIVATE)}"), settings(allow_private_urls=True)) == b"bytes"


@pytest.mark.parametrize("target", ["ftp://127.0.0.1/a.png", "file:///etc/passwd", "gopher://127.0.0.1/"])
def test_a_redirect_leads_to_http_alone(target: str, start: Callable[[Respond], Site]) -> None:
    site = start(redirected)
    with pytest.raises(MediaError, match="cannot be fetched"):
        fetch(site.at(PUBLIC, f"/{target}"), settings(allow_private_urls=True))


@pytest.mark.usefixtures("_one_is_public")
def test_the_address_that_was_checked_is_the_one_that_is_connected_to(
    start: Callable[[Respond], Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name server that says something else each time (DNS rebinding) leads nowhere else."""
    site = start(answered)
    answers: list[list[str]] = []

    def resolve(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        kind = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
        return [(*kind, (address, port)) for address in answers.pop(0)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    answers[:] = [[PUBLIC], [PRIVATE], [PRIVATE, PUBLIC]]
    assert fetch(site.at("images.example"), settings()) == b"bytes"
    with pytest.raises(MediaError, match=f"leads to {PRIVATE}"):
        fetch(site.at("images.example"), settings())
    assert fetch(site.at("images.example"), settings()) == b"bytes"
    assert {host for host, _ in site.asked} == {PUBLIC}


@pytest.mark.usefixtures("_one_is_public")
def test_a_proxy_is_asked_only_where_private_addresses_may_be(
    start: Callable[[Respond], Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = start(answered)
    monkeypatch.setenv("http_proxy", site.at(PRIVATE))
    fetch(site.at(PUBLIC), settings())
    fetch(site.at(PUBLIC), settings(allow_private_urls=True))
    assert [host for host, _ in site.asked] == [PUBLIC, PRIVATE]


def test_what_was_compressed_for_the_way_stays_as_it_came(start: Callable[[Respond], Site]) -> None:
    """A body of a megabyte could become one of any size."""

    def compressed(handler: BaseHTTPRequestHandler) -> None:
        assert handler.headers["Accept-Encoding"] == "identity"
        handler.send_response(200)
        handler.send_header("Content-Encoding", "gzip")
        handler.end_headers()
        handler.wfile.write(b"bytes")

    assert fetch(start(compressed).at(PUBLIC), settings(allow_private_urls=True)) == b"bytes"


def test_an_error_does_not_tell_the_signature_of_an_address(start: Callable[[Respond], Site]) -> None:
    site = start(lambda handler: handler.send_error(403))
    with pytest.raises(MediaError, match="403 Forbidden") as caught:
        fetch(site.at(PUBLIC, "/a.png?signature=secret"), settings(allow_private_urls=True))
    assert "secret" not in str(caught.value)
