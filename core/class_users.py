"""ClassUsers: which workflows name each user's class. A class that none names is dropped."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from core.run_class import RunClass


class ClassUsers:
    """by_name: name -> class, of all that are known."""

    def __init__(self, classes: Iterable[RunClass] = (), users: Mapping[str, Collection[str]] | None = None) -> None:
        """users: workflow -> names of the classes that it names. A class that none of them names is kept for good."""
        self.by_name = {each.name: each for each in classes}
        self._users = {workflow: frozenset(names) for workflow, names in (users or {}).items()}
        self._kept = self.by_name.keys() - self._named()

    def add(self, workflow: str, classes: Iterable[RunClass]) -> None:
        """Note a workflow with all classes that it names."""
        mine = {each.name: each for each in classes}
        self.by_name.update(mine)
        self._users[workflow] = frozenset(mine)

    def drop(self, workflow: str) -> list[RunClass]:
        """Forget a workflow, and the classes that no other one names any more, which are returned."""
        mine = self._users.pop(workflow, frozenset()) - self._kept - self._named()
        return [self.by_name.pop(name) for name in sorted(mine & self.by_name.keys())]

    def _named(self) -> frozenset[str]:
        return frozenset[str]().union(*self._users.values())
