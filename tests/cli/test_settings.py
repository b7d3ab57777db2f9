"""The store and the code that a command works on, and stores that cannot be used."""

import os
import subprocess
import sys
import uuid

import psycopg
import pytest

from cli import flows
from cli.conftest import FLOWS, Cli
from patience import HANG_SECONDS
from perdure.cli.settings import Settings
from perdure.errors import UsageError
from postgres_server import shared_server


def project(folder, text):
    (folder / "pyproject.toml").write_text(f"[tool.perdure]\n{text}\n")


def test_the_flag_wins_over_the_environment_which_wins_over_the_project(tmp_path):
    project(tmp_path, 'store = "project.db"')
    environ = {"PERDURE_STORE": "environment.db"}

    assert Settings(environ, tmp_path, store_flag="flag.db").store() == "flag.db"
    assert Settings(environ, tmp_path).store() == "environment.db"
    assert Settings({}, tmp_path).store().endswith("project.db")


def test_without_any_word_the_store_is_perdure_db(tmp_path):
    assert Settings({}, tmp_path).store() == "perdure.db"


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("data/shop.db", "data/shop.db"),
        ("sqlite:///data/shop.db", "data/shop.db"),
        ("file:./store", "store"),
        ("sqlite:///data/shop.db?durability=relaxed", "data/shop.db"),
        ("file:./store?archive=30d", "store"),
    ],
)
def test_a_relative_store_of_a_project_lies_beside_its_file(tmp_path, monkeypatch, written, found):
    project(tmp_path, f'store = "{written}"')
    below = tmp_path / "src" / "deep"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)

    settings = Settings({}, below)

    assert settings.place(settings.store()).resolve() == (tmp_path / found).resolve()
    assert settings.store().partition("?")[2] == written.partition("?")[2]


@pytest.mark.parametrize("scheme", ["sqlite:///", "file:"])
def test_a_store_with_options_is_the_store_without_them(scheme, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    option = "durability=relaxed" if scheme == "sqlite:///" else "archive=30d"

    Cli(f"{scheme}shop")("start", "x", "--id", "x-1")
    listed = Cli(f"{scheme}shop?{option}")("list", "-o", "ids")

    assert listed.out == "x-1\n"
    assert [path.name for path in tmp_path.iterdir()] == ["shop"]


@pytest.mark.parametrize("store", ["sqlite:///shop.db?{}", "file:shop?{}", "shop.db?{}"])
@pytest.mark.parametrize("command", [("start", "x"), ("list",), ("db", "backup", "b")])
def test_an_unknown_option_of_a_store_is_refused(store, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    refused = Cli(store.format("durabilty=relaxed"))(*command, code=2)

    assert "durabilty" in refused.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("places", [("a.db", "sqlite:///b.db?x=1"), ("file:a?x=1", "b.db")])
def test_an_unknown_option_of_a_copied_store_is_refused(places, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Cli("a.db")("start", "x")

    refused = Cli(None)("db", "copy", *places, code=2)

    assert "have no option 'x'" in refused.err
    assert not (tmp_path / "b.db").exists()


def test_the_modules_come_from_flag_environment_or_project(tmp_path):
    project(tmp_path, 'module = ["shop.flows", "shop.mail"]')

    assert Settings({}, tmp_path).modules(("given",)) == ("given",)
    assert Settings({"PERDURE_MODULE": "a,b"}, tmp_path).modules(()) == ("a", "b")
    assert Settings({}, tmp_path).modules(()) == ("shop.flows", "shop.mail")


@pytest.mark.parametrize("written", ["flows.py", "./flows.py:hello", "code/../flows.py"])
def test_a_file_of_a_project_lies_beside_its_file(tmp_path, monkeypatch, written):
    project(tmp_path, f'module = ["{written}", "shop.flows"]')
    below = tmp_path / "src" / "deep"
    below.mkdir(parents=True)
    (tmp_path / "code").mkdir()
    monkeypatch.chdir(below)

    file, module = Settings({}, below).modules(())

    place, colon, attribute = file.partition(":")
    assert (below / place).resolve() == (tmp_path / "flows.py").resolve()
    assert (colon + attribute) == (":hello" if "hello" in written else "")
    assert module == "shop.flows"


def test_commands_of_a_subfolder_use_the_code_of_the_project(sqlite_cli, tmp_path, monkeypatch):
    sqlite_cli.run(("a-1", flows.approval, 1), until_open={"a-1"})
    (tmp_path / "project_flows.py").write_text("from cli.flows import approval, greet\n")
    project(tmp_path, 'store = "store.db"\nmodule = "project_flows.py"')
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")

    assert "wait_for_event" in sqlite_cli("stack", "a-1", env={"PERDURE_STORE": None}).out


@pytest.mark.parametrize("text", ["store = 3", "store = [", 'store = ""'])
def test_a_broken_project_file_is_named(tmp_path, text):
    project(tmp_path, text)

    with pytest.raises(UsageError, match=r"pyproject\.toml"):
        Settings({}, tmp_path).store()


@pytest.mark.parametrize("text", ["module = 3", "module = [3]", "module = {a = 1}"])
def test_modules_of_a_project_that_are_no_texts_are_refused(tmp_path, text):
    project(tmp_path, text)

    with pytest.raises(UsageError, match="a text or list of them"):
        Settings({}, tmp_path).modules(())


def test_a_misspelt_setting_of_a_project_is_warned_of(sqlite_cli, tmp_path):
    sqlite_cli.run()
    project(tmp_path, 'stor = "other.db"\nkeep = {completed = "30d"}')

    said = sqlite_cli("list", env={"PERDURE_STORE": None, "PERDURE_MODULE": None}, code=3).err

    assert "[tool.perdure] has no setting 'stor'; did you mean 'store'?" in said
    assert "'keep'" not in said


def test_a_broken_project_file_does_not_matter_where_the_store_is_named(sqlite_cli, tmp_path):
    project(tmp_path, "store = [")

    assert sqlite_cli("db", "migrate").code == 0


_SECRET_URLS = [
    "postgresql://ann:hunter2@127.0.0.1:1/shop",
    "postgresql://ann:hun%74er2@127.0.0.1:1/shop",
    "postgresql://ann:hun#hunter2@127.0.0.1:1/shop",
    "postgresql://ann:hun?hunter2@127.0.0.1:1/shop",
    "postgresql://ann:hun/hunter2@127.0.0.1:1/shop",
    "postgresql://ann:hun@hunter2@127.0.0.1:1/shop",
    "postgresql://ann:hunter2%@127.0.0.1:1/shop",
    "postgresql://ann:hunter2@[127.0.0.1:1/shop",
    "postgresql://ann@127.0.0.1:1/shop?password=hunter2",
    "postgresql://ann@127.0.0.1:1/shop?sslpassword=hunter2&sslmode=require",
    "postgres:///shop?host=/nowhere&%70assword=hunter2",
    "nosuch://ann:hunter2@127.0.0.1/shop?token=hunter2",
    "sqlite://ann:hunter2@127.0.0.1/shop",
]


_SHOWING = [
    ["list"],
    ["doctor", "-o", "json"],
    ["worker", FLOWS],
    ["start", "hello"],
    ["db", "info", "-o", "json"],
    ["db", "migrate", "--dry-run"],
    ["db", "backup", "{store}"],
    ["db", "copy", "{store}", "other.db"],
    ["db", "copy", "other.db", "{store}"],
    ["list", "{store}", "too many"],
]


def shows_no_password(cli, words, store):
    flag = () if "{store}" in words else ("--store", store)
    answer = cli(*(word.format(store=store) for word in words), *flag, code=None)
    told = answer.out + answer.err
    return bool(told) and not any(secret in told for secret in ("hunter2", "hun%74er2"))


@pytest.mark.parametrize("words", _SHOWING)
def test_no_command_shows_the_password_of_a_url_that_cannot_be_read(words, sqlite_cli):
    Cli("other.db")("db", "migrate")
    for url in _SECRET_URLS:
        for more in ("unknown=1", "nothing"):
            store = f"{url}{'&' if '=hunter2' in url else '?'}{more}"
            assert shows_no_password(sqlite_cli, words, store), store


@pytest.mark.parametrize("url", _SECRET_URLS)
def test_no_command_shows_the_password_of_a_server_that_is_out(url, sqlite_cli):
    assert shows_no_password(sqlite_cli, ["list"], url)


def test_no_command_shows_a_password_of_the_project_file(sqlite_cli, tmp_path):
    project(tmp_path, 'store = "postgresql://ann:hunter2%@db.example/shop"')

    answer = sqlite_cli("list", code=2, env={"PERDURE_STORE": None})

    assert "cannot be read" in answer.err
    assert "hunter2" not in answer.err


def test_store_may_stand_before_or_after_the_command(sqlite_cli, tmp_path):
    Cli("other.db")("start", "hello", "--id", "there")

    assert sqlite_cli("--store", "other.db", "list", "-o", "ids").lines == ["there"]
    assert sqlite_cli("list", "--store", "other.db", "-o", "ids").lines == ["there"]


@pytest.mark.parametrize("command", ["list", "count", "doctor", "workers"])
def test_looking_at_a_missing_store_does_not_create_it(sqlite_cli, tmp_path, command):
    sqlite_cli(command, code=0 if command == "doctor" else 3)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("store", "code", "said"),
    [
        ("gone.db", 3, "there is no store at gone.db"),
        ("file:./gone", 3, "there is no store at file:./gone"),
        ("nosuch://x", 2, "no provider for"),
        ("memory:", 2, "gone with its process"),
        ("", 3, "there is no store at perdure.db"),
        ("text.txt", 6, "is not an SQLite database"),
        ("folder", 2, "is a directory; write --store file:folder"),
    ],
)
def test_a_store_that_cannot_be_used_is_one_line(sqlite_cli, tmp_path, store, code, said):
    (tmp_path / "text.txt").write_text("hello, this is no database\n")
    (tmp_path / "folder").mkdir()
    sqlite_cli.store = store

    answer = sqlite_cli("list", code=code)

    assert said in answer.err
    assert answer.err.count("\n") == 1


WITHOUT_RIGHTS = """
import os, sys
import perdure.cli.commands.list, perdure.providers.sqlite
from perdure.cli.main import root
if os.geteuid() == 0:  # root may read everything
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
root.main(["list"])
"""


_LOOKING = [
    ["list"],
    ["count"],
    ["show", "h-1"],
    ["history", "h-1"],
    ["tree", "h-1"],
    ["result", "h-1"],
    ["watch"],
    ["workers"],
    ["export", "h-1"],
    ["replay", FLOWS],
    ["purge", "h-1", "--yes"],
    ["doctor"],
    ["db", "info"],
    ["db", "check"],
    ["db", "backup", "saved"],
    ["db", "prune", "--keep-last", "1", "--dry-run"],
    ["db", "migrate", "--dry-run"],
    ["db", "copy", "{store}", "copy.db"],
]


def content_of(folder):
    """Return the files and their times, without that of the last access."""
    found = {path: path.stat() for path in folder.rglob("*")}
    return {path: (stat.st_mode, stat.st_size, stat.st_mtime_ns) for path, stat in found.items()}


@pytest.mark.parametrize("words", _LOOKING)
@pytest.mark.parametrize("kind", ["nothing", "empty directory", "empty file"])
def test_looking_at_an_empty_place_does_not_make_a_store_of_it(sqlite_cli, tmp_path, kind, words):
    place = tmp_path / "place"
    url = "place" if kind == "empty file" else "file:./place"
    if kind == "empty directory":
        place.mkdir(mode=0o755)
    elif kind == "empty file":
        place.touch()
    before = content_of(tmp_path)

    flag = () if "{store}" in words else ("--store", url)
    answer = sqlite_cli(*(word.format(store=url) for word in words), *flag, code=None)

    if words[-1] == "--dry-run" and words[1] == "migrate" and kind == "empty file":
        assert answer.code == 0  # says what opening would do
    elif words == ["doctor"]:
        assert answer.code == 0
        assert "there is no store at" in answer.out
    else:
        assert answer.code == 3
        assert "there is no store at" in answer.err
    assert content_of(tmp_path) == before


@pytest.mark.parametrize("words", _LOOKING)
@pytest.mark.parametrize("size", [1, 99, 10_000])
def test_a_text_file_is_never_taken_for_a_store(sqlite_cli, tmp_path, size, words):
    (tmp_path / "notes.txt").write_text("n" * size)

    flag = () if "{store}" in words else ("--store", "notes.txt")
    answer = sqlite_cli(*(word.format(store="notes.txt") for word in words), *flag, code=None)

    assert answer.code == (1 if words == ["doctor"] else 6)
    assert "is not an SQLite database" in answer.out + answer.err
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt"}
    assert (tmp_path / "notes.txt").read_text() == "n" * size


def test_a_store_without_permission_is_one_line(sqlite_cli, environ, tmp_path):
    sqlite_cli("db", "migrate")
    (tmp_path / "store.db").chmod(0)

    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_RIGHTS],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 1
    assert "ermission" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_newer_store_is_refused(sqlite_cli):
    sqlite_cli("db", "migrate")
    import apsw

    connection = apsw.Connection("store.db")
    connection.pragma("user_version", 9999)
    connection.close()

    answer = sqlite_cli("list", code=6)

    assert "newer version of perdure" in answer.err
    assert answer.err.count("\n") == 1


def test_a_filesystem_store_in_use_names_its_holder(cli, environ, tmp_path):
    if not str(cli.store).startswith("file:"):
        pytest.skip("only a store for one process can be held")
    cli.run(("a-1", flows.approval, 1), until_open={"a-1"})
    worker = subprocess.Popen(
        [sys.executable, "-m", "perdure", "worker", "cli.flows", "--store", cli.store],
        env=environ,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
    )
    try:
        assert any(b"on filesystem" in worker.stderr.readline() for _ in range(2))
        answer = cli("list", code=6)
    finally:
        worker.terminate()
        worker.communicate(timeout=HANG_SECONDS)

    assert str(worker.pid) in answer.err
    assert answer.err.count("\n") == 1


def test_a_store_that_was_moved_names_the_new_place(cli):
    cli("db", "migrate")
    cli.call(lambda client: client.provider.admin.mark_moved("sqlite:///new.db"))

    assert "new.db" in cli("list", code=6).err


@pytest.fixture
def bare_schema():
    """The URL of a schema that is not there, and a question whether it is."""
    schema = f"bare_{uuid.uuid4().hex}"

    def exists():
        with psycopg.connect(shared_server().dsn) as connection:
            return connection.execute(
                "SELECT 1 FROM pg_namespace WHERE nspname = %s", (schema,)
            ).fetchone()

    return f"{shared_server().dsn}&schema={schema}", exists


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["list"], 3),
        (["show", "h-1"], 3),
        (["db", "info"], 3),
        (["db", "check"], 3),
        (["db", "migrate", "--dry-run"], 0),
        (["doctor"], 0),
    ],
)
def test_looking_at_a_server_without_a_store_does_not_create_it(
    sqlite_cli, bare_schema, args, code
):
    sqlite_cli.store, exists = bare_schema

    answer = sqlite_cli(*args, code=code)

    assert not exists()
    assert code == 0 or "there is no store at postgresql:" in answer.err


def test_a_store_on_a_server_is_looked_at_once_it_is_there(sqlite_cli, bare_schema, tmp_path):
    sqlite_cli.store, exists = bare_schema
    copy = str(tmp_path / "copy.db")
    assert "there is no store" in sqlite_cli("db", "copy", sqlite_cli.store, copy, code=3).err

    sqlite_cli("start", "hello", "--id", "h-1")

    assert exists()
    assert sqlite_cli("list", "-o", "ids").lines == ["h-1"]
    assert "copied 1 of 1" in sqlite_cli("db", "copy", sqlite_cli.store, copy).out


def test_an_unreachable_server_does_not_tell_the_password(sqlite_cli):
    sqlite_cli.store = "postgresql://ann:s3cret@127.0.0.1:1/shop?connect_timeout=1"

    answer = sqlite_cli("list", code=1)

    assert "s3cret" not in answer.err
    assert answer.err.count("\n") == 1


def test_the_project_file_of_another_user_chooses_nothing(sqlite_cli, tmp_path, monkeypatch):
    sqlite_cli.store = ""
    file = tmp_path / "pyproject.toml"
    file.write_text('[tool.perdure]\nstore = "theirs.db"\nmodule = "theirs.py"\n')
    assert "there is no store at theirs.db" in sqlite_cli("list", code=3).err
    if os.geteuid() == 0:
        os.chown(file, 4242, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4242)

    refused = sqlite_cli("list", code=3)

    assert f"{file} belongs to another user and is ignored" in refused.err
    assert "there is no store at perdure.db" in refused.err
    assert "-m" in sqlite_cli("stack", "x", code=2).err
