"""The names that ``perdure`` exports."""

import perdure

SHADOWING = {"now", "random", "state", "uuid4"}


def test_a_star_import_shadows_no_module_and_no_common_name():
    assert SHADOWING.isdisjoint(perdure.__all__)


def test_every_listed_name_can_be_imported():
    assert set(dir(perdure)) == {*perdure.__all__, *SHADOWING}
    assert all(hasattr(perdure, name) for name in dir(perdure))
