"""The author's line: that of the last frame that is neither perdure's nor a library's."""

from pathlib import Path

import pytest

import perdure
from perdure.model.failures import author_line

PACKAGE = Path(perdure.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
AUTHOR = '  File "/home/ann/perdure/flows.py", line 7, in buy\n    await charge()\n'


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_no_file_of_perdure_is_taken_for_the_authors(file):
    text = f'{AUTHOR}  File "{file}", line 3, in inner\n    raise error\n'

    assert author_line(text) == "/home/ann/perdure/flows.py:7"
