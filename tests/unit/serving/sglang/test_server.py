"""The life of a server, with a stand-in for SGLang that answers ``/health`` alone."""

from __future__ import annotations

import http.server
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from anygauge.serving.sglang import server as server_module
from anygauge.serving.sglang.installed import Installed
from anygauge.serving.sglang.server import SGLangServer
from anygauge.serving.sglang.versions import find_api
from anygauge.serving.sglang.weights import SGLangPeer
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.sglang import ServerKeys, WeightApi
from anygauge_tests.processes import wait_until_ended

STAND_IN = {
    "__init__.py": "",
    "srt/__init__.py": "",
    "srt/plugins.py": "def load_plugins(): pass",
    "srt/utils.py": "def kill_process_tree(pid, include_parent): pass",
    "srt/server_args.py": """
class Arguments(list):
    dp_size = 1

def prepare_server_args(words):
    print("checked", flush=True)
    return Arguments(words)
""",
    "launch_server.py": """
import http.server, os, signal, subprocess, sys, time

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        if self.path == "/server_info" and self.headers["Authorization"] == "Bearer sk-for-all":
            self.wfile.write(b'{"internal_states": [{"effective_max_running_requests_per_dp": 96}]}')
    def log_message(self, *words): pass

def run_server(words):
    what = words[words.index("--dtype") + 1]
    print("starting", what, vars(words), flush=True)
    if what == "looks":
        print("free", os.path.exists(os.environ["MARK"]), sys.stdin.read() == "", flush=True)
    if what == "tells":
        is_inherited = "ANYGAUGE_SGLANG_KEYS" in os.environ
        print("said", os.environ["MARK"] == words.admin_api_key, is_inherited, flush=True)
        print("meets at", os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"], flush=True)
    if what == "fails":
        raise SystemExit("the model is missing")
    if what == "hangs":
        time.sleep(1000)
    port = int(words[words.index("--port") + 1])
    if what == "loses" and not os.path.exists(os.environ["MARK"]):
        open(os.environ["MARK"], "w").close()
        raise SystemExit("OSError: [Errno 98] Address already in use")
    server = http.server.HTTPServer(("127.0.0.1", port), Handler)
    name = f"/dev/shm/sglang_loads_unit_{os.getpid()}"
    held = open(name, "w")
    stamped = open(f"/dev/shm/sgl_shm_unit_{os.getpid()}_ab", "w").close()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    if what == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server.serve_forever()
""",
}

KEYS = ServerKeys(api="sk-for-all", admin="sk-for-the-run")
Make = Callable[..., SGLangServer]


class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *words: object) -> None: ...


@pytest.fixture
def make(tmp_path: Path, installed: Installed, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    for name, text in STAND_IN.items():
        path = tmp_path / "site" / "sglang" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    paths = os.pathsep.join([str(tmp_path / "site"), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "ANYGAUGE_SGLANG_BACKEND": "cpu"}
    monkeypatch.setattr(server_module, "GRACE_S", 0.5)
    made: list[SGLangServer] = []

    def server(what: str = "serves", *, deadline_s: float = 60.0, **variables: str) -> SGLangServer:
        made.append(
            SGLangServer(
                arguments={"dtype": what, "tp_size": 1},
                installed=installed,
                api=find_api("0.5.23"),
                device_type="cpu",
                environment={**environment, **variables},
                keys=KEYS,
                host="127.0.0.1",
                log=tmp_path / "logs" / "rollout-0-engine.log",
                deadline_s=deadline_s,
            )
        )
        return made[-1]

    yield server
    for each in made:
        each.close()


def family(server: SGLangServer) -> list[psutil.Process]:
    supervisor = psutil.Process(int(server.facts()["pid"])).parent()
    assert supervisor is not None
    return [supervisor, *supervisor.children(recursive=True)]


def traces(pid: str) -> list[Path]:
    return [Path(f"/dev/shm/sglang_loads_unit_{pid}"), Path(f"/dev/shm/sgl_shm_unit_{pid}_ab")]


def test_a_server_starts_answers_and_ends_with_all_that_it_made(make: Make) -> None:
    server = make()
    assert not server.is_alive()
    address = server.start()
    facts = server.facts()
    assert server.is_alive()
    assert (facts["address"], facts["version"]) == (address, "0.5.23")
    assert server.peer() == SGLangPeer(
        address=address,
        device="cpu",
        api=WeightApi(checksums="sha256"),
        keys=KEYS,
        max_running_requests=96,
    )
    assert f"--port {address.rpartition(':')[2]}" in facts["command"]
    assert "--nccl-port" in facts["command"]
    processes, files = family(server), traces(facts["pid"])
    assert len(processes) == 3
    assert all(path.exists() for path in files)
    server.close()
    assert not any(each.is_running() for each in processes)
    assert not any(path.exists() for path in files)
    assert not server.is_alive()


def test_the_server_has_its_keys_and_no_log_or_command_line_shows_them(make: Make) -> None:
    server = make("tells", MARK=KEYS.admin)
    server.start()
    log = server.log.read_text()
    assert "starting tells {'api_key': '***', 'admin_api_key': '***'}" in log, "as SGLang logs its arguments"
    assert "said True False" in log, "it has the key, and what it starts does not inherit it"
    shown = [log, repr(server.facts()), *(" ".join(each.cmdline()) for each in family(server))]
    assert not any("sk-for" in text for text in shown)


def test_the_processes_of_a_server_meet_in_a_directory_of_its_user_alone(make: Make) -> None:
    server = make("tells", MARK="")
    server.start()
    (place,) = re.findall(r"meets at file://(.+)/meeting", server.log.read_text())
    assert Path(place).stat().st_mode & 0o077 == 0
    server.close()
    assert not Path(place).exists()


def test_a_killed_server_leaves_nothing_and_starts_again_into_the_same_log(make: Make) -> None:
    server = make("stubborn")
    first = server.start()
    processes, pid = family(server), server.facts()["pid"]
    os.kill(int(pid), signal.SIGKILL)
    assert not wait_until_ended(processes, 30)
    assert not server.is_alive()
    assert not any(path.exists() for path in traces(pid))
    assert server.start() != first
    assert server.is_alive()
    assert Path(server.facts()["log"]).read_text().count("starting stubborn") == 2
    processes = family(server)
    server.close()
    assert not any(each.is_running() for each in processes), "one that hears no order to end is killed"


def test_a_server_that_ends_before_it_answers_is_an_error_with_the_end_of_its_log(make: Make) -> None:
    with pytest.raises(RolloutError, match="ended with status 1 before it answered") as caught:
        make("fails").start()
    assert "    the model is missing" in str(caught.value)


def test_a_server_that_does_not_answer_in_time_is_an_error_and_is_ended(make: Make) -> None:
    server = make("hangs", deadline_s=0.5)
    with pytest.raises(RolloutError, match=r"did not answer within 0\.5 s") as caught:
        server.start()
    assert "raise placement.start_timeout_s" in str(caught.value)
    assert not server.is_alive()


def test_a_server_that_has_begun_is_the_one_that_starts(make: Make) -> None:
    server = make()
    server.begin(hold=False)
    wait_for_log(server, "starting")
    begun = server.facts()["pid"]
    server.start()
    assert server.facts()["pid"] == begun
    assert server.log.read_text().count("starting serves") == 1


def test_a_server_on_hold_touches_nothing_before_it_is_waited_for(make: Make, tmp_path: Path) -> None:
    mark = tmp_path / "the trainers sleep"
    server = make("looks", MARK=str(mark))
    server.begin(hold=True)
    wait_for_log(server, "checked")
    time.sleep(0.2)  # one that does not hold has gone on by now
    mark.touch()
    server.start()
    assert "free True True" in server.log.read_text()


def test_a_server_reads_nothing_where_it_is_not_on_hold(make: Make, tmp_path: Path) -> None:
    server = make("looks", MARK=str(tmp_path / "none"))
    server.start()
    assert "free False True" in server.log.read_text()


def test_a_server_that_has_begun_and_ended_is_an_error_with_its_log(make: Make) -> None:
    server = make("fails")
    server.begin(hold=False)
    wait_for_log(server, "the model is missing")
    with pytest.raises(RolloutError, match="ended with status 1 before it answered"):
        server.start()


def test_a_server_that_has_begun_and_lost_its_port_is_started_again(make: Make, tmp_path: Path) -> None:
    server = make("loses", MARK=str(tmp_path / "lost"))
    server.begin(hold=False)
    wait_for_log(server, "already in use")
    assert server.start()
    assert server.log.read_text().count("starting loses") == 2


def test_a_server_on_hold_ends_with_its_processes(make: Make) -> None:
    server = make()
    server.begin(hold=True)
    wait_for_log(server, "checked")
    processes = family(server)
    server.close()
    assert not any(each.is_running() for each in processes)
    server.start()
    assert server.log.read_text().count("starting serves") == 1, "another process, which is not on hold"


def wait_for_log(server: SGLangServer, text: str) -> None:
    deadline = time.monotonic() + 60
    while text not in server.log.read_text():
        assert time.monotonic() < deadline, server.log.read_text()
        time.sleep(0.02)


def test_a_server_that_lost_its_port_is_started_with_another(make: Make, tmp_path: Path) -> None:
    server = make("loses", MARK=str(tmp_path / "lost"))
    assert server.start()
    assert Path(server.facts()["log"]).read_text().count("starting loses") == 2


def test_another_server_on_the_port_is_not_taken_for_this_one(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = http.server.HTTPServer(("127.0.0.1", 0), Healthy)
    thread = threading.Thread(target=other.serve_forever)
    thread.start()
    taken = server_module._free_ports("127.0.0.1")._replace(http=other.server_port)
    monkeypatch.setattr(server_module, "_free_ports", lambda host, http: taken)
    monkeypatch.setattr(server_module, "TRIES", 1)
    try:
        with pytest.raises(RolloutError, match="Address already in use"):
            make().start()
    finally:
        other.shutdown()
        thread.join()
        other.server_close()


def test_a_server_ends_with_a_killed_owner(make: Make, tmp_path: Path) -> None:
    server = make()
    server.start()
    supervisor, processes = server._supervisor, family(server)
    pid = server.facts()["pid"]
    assert supervisor is not None
    assert supervisor.stdin is not None
    supervisor.stdin.close()  # as the kernel does when the owner is killed
    assert not wait_until_ended(processes[1:], 30)
    supervisor.wait(timeout=30)
    assert not any(path.exists() for path in traces(pid))


def test_a_server_ends_with_a_killed_supervisor(make: Make) -> None:
    server = make()
    server.start()
    processes = family(server)
    processes[0].kill()
    assert not wait_until_ended(processes[:2], 30)
    assert not server.is_alive()
    for orphan in processes[2:]:
        orphan.kill()
    for path in traces(str(processes[1].pid)):
        path.unlink(missing_ok=True)


def test_ports_that_are_free_differ_and_can_be_listened_on() -> None:
    ports = server_module._free_ports("127.0.0.1")
    assert len(set(ports)) == len(ports)
    for port in ports:
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_a_server_that_is_slow_to_say_that_it_is_well_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "ANSWER_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not server_module._answers("127.0.0.1", silent.getsockname()[1])
