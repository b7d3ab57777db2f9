"""Texts of others cannot forge log lines, flood the log, or show what is to be redacted."""

import json
import logging

import pytest

from perdure.logs import TRACEBACK, JsonFormatter, get_logger, redact_logs

log = get_logger("perdure.runtime.of_a_test")
FORGED = "boom\n2026-11-18 10:00:00 ERROR forged\x1b[31m\u2028end"


@pytest.fixture(autouse=True)
def without_redaction():
    yield
    redact_logs(lambda text: text)


def lines(caplog, formatter=None):
    formatter = formatter or logging.Formatter("%(levelname)s %(message)s")
    return [line for record in caplog.records for line in formatter.format(record).split("\n")]


def test_an_argument_stays_on_its_line(caplog):
    log.warning("it failed: %s after %d tries of %r", ValueError(FORGED), 3, "id")
    (line,) = lines(caplog)
    escaped = "boom\\n2026-11-18 10:00:00 ERROR forged\\x1b[31m\\u2028end"
    assert line == f"WARNING it failed: {escaped} after 3 tries of 'id'"


def test_the_lines_of_a_traceback_are_indented(caplog):
    try:
        raise ValueError(FORGED)
    except ValueError:
        log.exception("it failed")
    log.error("stored", extra={TRACEBACK: f"Traceback\nValueError: {FORGED}\n"})
    first, second = [i for i, line in enumerate(lines(caplog)) if not line.startswith("  ")]
    assert (lines(caplog)[first], lines(caplog)[second]) == ("ERROR it failed", "ERROR stored")
    assert "\x1b" not in "".join(lines(caplog))
    assert lines(caplog)[-1] == "  2026-11-18 10:00:00 ERROR forged\\x1b[31m\\u2028end"


def test_long_texts_are_shortened(caplog):
    log.error("it failed: %s", "x" * 50_000, extra={TRACEBACK: "y\n" * 50_000})
    assert sum(map(len, lines(caplog))) < 25_000
    assert "(shortened)" in caplog.text


def test_a_function_of_the_user_redacts_arguments_and_tracebacks(caplog):
    redact_logs(lambda text: text.replace("sk_live_1", "***"))
    try:
        raise ValueError("wrong key sk_live_1")
    except ValueError:
        log.exception("it failed: %s", "sk_live_1")
    assert "sk_live_1" not in "".join(lines(caplog))
    assert "wrong key ***" in caplog.text


class Unprintable(Exception):
    def __str__(self):
        raise KeyError("no text")


def test_a_text_that_cannot_be_made_or_redacted_names_the_error_and_stops_nothing(caplog):
    log.warning("it failed: %s", Unprintable())
    redact_logs(lambda text: text[1_000])
    try:
        raise ValueError("secret")
    except ValueError:
        log.exception("it failed: %s", "secret")
    written = "".join(lines(caplog))
    assert "it failed: (not written: KeyError" in written
    assert written.count("(not written: IndexError in redact_logs or in the text itself)") == 2
    assert "secret" not in written


def test_json_is_one_object_a_line_with_the_fields(caplog):
    try:
        raise ValueError(FORGED)
    except ValueError:
        log.exception("it failed: %s", FORGED, extra={"instance_id": "o-1", "attempt": 2})
    logging.getLogger("other").warning("plain %s", FORGED)
    first, second = (json.loads(line) for line in lines(caplog, JsonFormatter()))
    assert first["level"] == "ERROR"
    assert first["logger"] == "perdure.runtime.of_a_test"
    assert (first["instance_id"], first["attempt"]) == ("o-1", 2)
    assert first["time"].endswith("+00:00")
    assert "ValueError: boom" in first["traceback"]
    assert second["message"] == f"plain {FORGED}"
    assert "traceback" not in second


def test_a_handler_that_raises_stops_no_work(capsys):
    class Broken(logging.Handler):
        def emit(self, record):
            raise OSError("the disk of the logs is full")

    broken = Broken()
    log.addHandler(broken)
    try:
        log.warning("it failed: %s", FORGED)
    finally:
        log.removeHandler(broken)
    assert "OSError: the disk of the logs is full" in capsys.readouterr().err
