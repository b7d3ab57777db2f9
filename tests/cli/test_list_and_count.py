"""``perdure list`` and ``perdure count``: filters, pages, forms of output."""

import pytest

from cli import flows


@pytest.fixture
def busy(cli):
    cli.run(
        ("a-1", flows.approval, 1),
        ("f-1", flows.failing, "boom"),
        ("h-1", flows.hello, "ann"),
        ("h-2", flows.hello, "bob"),
        until_open={"a-1"},
    )
    return cli


def test_list_shows_every_instance_newest_first(busy):
    assert busy("list", "-o", "ids").lines == ["h-2", "h-1", "f-1", "a-1"]


def test_list_says_what_each_instance_is_doing(busy):
    by_id = {line.split()[4]: line for line in busy("list").lines[1:]}

    assert "for event 'answer'; times out in 23h" in by_id["a-1"]
    assert "ValueError: boom" in by_id["f-1"]
    assert '→ "hello ann"' in by_id["h-1"]


def test_ls_is_the_same_as_list(busy):
    assert busy("ls", "-o", "ids").out == busy("list", "-o", "ids").out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["status:failed"], ["f-1"]),
        (["--status", "failed,running"], ["f-1", "a-1"]),
        (["--status", "failed", "--status", "running"], ["f-1", "a-1"]),
        (["status:open"], ["a-1"]),
        (["status:ended", "name:hello"], ["h-2", "h-1"]),
        (["name:h*"], ["h-2", "h-1"]),
        (["--name", "failing"], ["f-1"]),
        (["id:h-*"], ["h-2", "h-1"]),
        (["id:*-1"], ["h-1", "f-1", "a-1"]),
        (["boom"], ["f-1"]),
        (["--search", "HELLO ANN"], ["h-1"]),
        (["--search", "hello", "--search", "ann"], ["h-1"]),
        (["version:1.0.0", "id:h-1,h-2"], ["h-2", "h-1"]),
        (["created:<1h"], ["h-2", "h-1", "f-1", "a-1"]),
        (["created:>1h"], []),
        (["name:hello created:<1h"], ["h-2", "h-1"]),
        (["status:failed boom"], ["f-1"]),
        (["hello ann"], ["h-1"]),
        (["text:hello ann"], ["h-1"]),
        (["--since", "1h", "--query", "status:failed"], ["f-1"]),
        (["--until", "1h"], []),
        (["parent:none"], ["h-2", "h-1", "f-1", "a-1"]),
    ],
)
def test_filters_choose_instances(busy, words, expected):
    assert busy("list", "-o", "ids", *words).lines == expected
    assert busy("count", *words).out == f"{len(expected)}\n"


def test_pages_follow_each_other_without_gap_or_overlap(busy):
    first = busy("list", "-o", "json", "--limit", "3").json
    second = busy("list", "-o", "json", "--limit", "3", "--cursor", first["next_cursor"]).json

    ids = [instance["id"] for page in (first, second) for instance in page["instances"]]
    assert ids == ["h-2", "h-1", "f-1", "a-1"]
    assert second["next_cursor"] is None


def test_pages_of_a_pattern_follow_each_other_too(busy):
    first = busy("list", "id:*-1", "-o", "json", "--limit", "2").json
    second = busy(
        "list", "id:*-1", "-o", "json", "--limit", "2", "--cursor", first["next_cursor"]
    ).json

    ids = [instance["id"] for page in (first, second) for instance in page["instances"]]
    assert ids == ["h-1", "f-1", "a-1"]


def test_json_holds_the_same_as_the_table_and_nothing_else_is_printed(busy):
    answer = busy("list", "id:h-1", "-o", "json")

    (instance,) = answer.json["instances"]
    assert instance["id"] == "h-1"
    assert instance["name"] == "hello"
    assert instance["status"] == "Completed"
    assert instance["output"] == "hello ann"
    assert instance["failure"] is None
    assert instance["created_at"].endswith("Z")
    assert answer.err == ""


def test_jsonl_is_one_instance_a_line(busy):
    assert [document["id"] for document in busy("list", "-o", "jsonl").jsonl] == [
        "h-2",
        "h-1",
        "f-1",
        "a-1",
    ]


@pytest.mark.parametrize("output", ["ids", "jsonl", "table"])
def test_a_pipe_that_holds_a_part_says_so_beside_it_and_how_to_go_on(busy, output):
    part = busy("list", "-o", output, "--limit", "3")
    whole = busy("list", "-o", output, "--limit", "4")

    assert whole.err == ""
    assert "4 shown" not in whole.out
    assert part.out in whole.out or output == "table"
    said, cursor = part.err.removesuffix("\n").split(" --cursor ")
    assert said == "perdure: 3 shown, more follow: --limit 15, or"
    assert busy("list", "-o", "ids", "--cursor", cursor).lines == ["a-1"]


def test_a_pattern_does_not_promise_what_it_has_not_read(busy, monkeypatch):
    monkeypatch.setattr("perdure.client.search._TESTED_PAGE", 1)

    answer = busy("list", "id:*-2", "-o", "ids", "--limit", "1")

    assert answer.lines == ["h-2"]
    assert "1 shown, more may follow:" in answer.err


def test_a_list_that_says_itself_where_it_goes_on_needs_no_word_beside_it(busy):
    assert busy("list", "-o", "json", "--limit", "3").err == ""


def test_no_larger_limit_is_proposed_than_is_taken(busy, monkeypatch):
    monkeypatch.setattr("perdure.cli.commands.list.LIMIT_MAX", 3)

    said = busy("list", "-o", "ids", "--limit", "3").err

    assert said.startswith("perdure: 3 shown, more follow: --cursor ")


def test_count_by_status_and_by_name(busy):
    by_status = busy("count", "--by", "status", "-o", "json").json["by_status"]
    by_name = busy("count", "--by", "name", "-o", "json").json["by_name"]

    assert by_status == {"Running": 1, "Completed": 2, "Failed": 1}
    assert by_name == {"hello": 2, "approval": 1, "failing": 1}


def test_count_by_status_respects_the_filter(busy):
    groups = busy("count", "status:failed,completed", "--by", "status", "-o", "json").json

    assert groups == {"count": 3, "by_status": {"Completed": 2, "Failed": 1}}


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("statsu:failed", "did you mean 'status'?"),
        ("status:faild", "did you mean 'failed'?"),
        ("created:2h", "needs < or >"),
        ("created:>soon", "is no moment"),
        ("name:", "has no value"),
        ("name:a name:b", "was given twice"),
        ("text:'open", "cannot be read"),
    ],
)
def test_a_wrong_query_is_a_usage_error_that_says_what_to_write(sqlite_cli, query, said):
    sqlite_cli("db", "migrate")

    answer = sqlite_cli("list", "--query", query, code=2)

    assert said in answer.err
    assert answer.err.count("\n") == 1


def test_a_filter_that_takes_one_value_is_not_given_two(sqlite_cli):
    sqlite_cli("db", "migrate")

    assert "name: was given twice" in sqlite_cli("count", "--name", "a", "--name", "b", code=2).err


def test_a_bound_is_not_given_twice(sqlite_cli):
    sqlite_cli("db", "migrate")

    answer = sqlite_cli("list", "created:<2h", "--since", "1h", code=2)
    assert "--since and created: say the same twice" in answer.err


def test_a_bad_cursor_is_a_usage_error(sqlite_cli):
    sqlite_cli("db", "migrate")

    assert sqlite_cli("list", "--cursor", "nonsense", code=2).err.count("\n") == 1


def test_an_empty_store_lists_nothing_and_is_no_error(cli):
    cli("db", "migrate")

    assert len(cli("list").lines) == 1
    assert cli("list", "-o", "json").json == {"instances": [], "next_cursor": None}
    assert cli("list", "-o", "ids").out == ""
