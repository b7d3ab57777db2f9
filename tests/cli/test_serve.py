"""``perdure serve``: what it refuses before it listens."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from patience import HANG_SECONDS


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a.db", "--store", "b.db"], "either 'a.db' or --store 'b.db', not both"),
        (["a.db"], "there is no store at a.db"),
        (["--listen", "0.0.0.0:7700"], "needs --tokens FILE"),
        (["--listen", "example.com:7700"], "is no address"),
        (["--listen", "7700"], "must be HOST:PORT"),
    ],
)
def test_a_wrong_place_is_refused(tmp_path, arguments, words):
    done = subprocess.run(
        [sys.executable, "-m", "perdure", "serve", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode != 0
    assert words in done.stderr


@pytest.fixture
def served(tmp_path):
    """A server on a store with one instance: its process and its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    subprocess.run(
        [sys.executable, "-m", "perdure", "start", "hello", "--id", "a-1", "--store", "a.db"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    server = subprocess.Popen(
        [sys.executable, "-m", "perdure", "serve", "a.db", "--listen", address],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + HANG_SECONDS
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"http://{address}/livez").close()
        except OSError:
            time.sleep(0.05)
        else:
            break
    yield server, address
    server.kill()
    server.wait()


def test_an_action_is_a_line_of_its_output(served):
    server, address = served
    ask = urllib.request.Request(
        f"http://{address}/api/v1/run/pause", b'{"id": "a-1"}', {"X-Perdure-Write": "1"}
    )
    urllib.request.urlopen(ask).close()
    server.terminate()
    assert 'local /run/pause {"id":"a-1"}' in server.communicate(timeout=HANG_SECONDS)[1]


def test_a_server_with_an_open_page_stops_without_a_word(served):
    server, address = served
    with urllib.request.urlopen(f"http://{address}/api/v1/stream?id=a-1") as page:
        assert b"event: change\n" in iter(page.readline, b"")
        server.terminate()
        page.read()  # to the end of the stream
    said = server.communicate(timeout=HANG_SECONDS)[1]
    assert [line for line in said.splitlines() if "Ctrl-C ends it" not in line] == []
