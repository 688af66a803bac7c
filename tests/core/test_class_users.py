"""Which classes are known while workflows that name them come and go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from core.class_users import ClassUsers
from core.run_class import ClassText, RunClass

NAMES = "abcd"
CLASSES = {name: RunClass(name=name, path=f"module_{name}:Class") for name in NAMES}


@given(st.lists(st.tuples(st.sampled_from("vwxyz"), st.one_of(st.none(), st.sets(st.sampled_from(NAMES))))))
def test_a_class_is_known_while_a_workflow_names_it(changes: list[tuple[str, set[str] | None]]) -> None:
    """None: the workflow is dropped. The class `a` is of none at the start, and stays."""
    users, named = ClassUsers([CLASSES["a"]]), dict[str, set[str]]()
    for workflow, names in changes:
        before = set(users.by_name)
        if names is None:
            named.pop(workflow, None)
            gone = {each.name for each in users.drop(workflow)}
        else:
            users.drop(workflow)
            named[workflow] = names
            users.add(workflow, [CLASSES[name] for name in names])
            gone = before - set(users.by_name)
        assert set(users.by_name) == {"a"}.union(*named.values())
        assert gone == before - set(users.by_name)


def test_those_of_the_start_are_dropped_with_their_workflow() -> None:
    users = ClassUsers(CLASSES.values(), {"w": "ab", "v": "b"})
    assert [each.name for each in users.drop("w")] == ["a"]
    assert [each.name for each in users.drop("w")] == []
    assert [each.name for each in users.drop("v")] == ["b"]
    assert list(users.by_name) == ["c", "d"], "no workflow has named them"


def test_a_text_goes_to_the_classes_of_its_module_alone() -> None:
    own = [RunClass(name=name, path=f"own_1:{name}", source="text", file="own.py") for name in "xy"]
    classes = [*own, CLASSES["a"]]
    text = ClassText.of(classes)
    assert text == ClassText("own_1", "text", "own.py")
    assert text.put_into([each.without_text for each in classes]) == tuple(classes)
    assert ClassText.of([CLASSES["a"]]) is None
