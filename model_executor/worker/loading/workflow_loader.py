"""WorkflowLoader: imports the classes of workflows that come while the worker serves, in the loader's thread."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable

from core.errors import ConfigError, InvalidRequestError
from core.failure import Failure
from core.ipc.logs import of_request
from core.messages.worker import DropWorkflow, LoadWorkflow, WorkflowLoaded
from model_executor.worker.loading.class_loader import ClassLoader
from model_executor.worker.loading.loader_thread import LoaderThread
from model_executor.worker.stores.user_classes import UserClasses

logger = logging.getLogger("stencil.worker")


class WorkflowLoader:
    """The order of loads and drops, and that of the orders to load or drop components, is kept. `report` is called in
    the thread, with the answer to each load. What the classes have loaded is dropped by the engine's plans.
    """

    def __init__(
        self,
        rank: int,
        classes: UserClasses,
        loader: ClassLoader,
        report: Callable[[WorkflowLoaded], None],
        thread: LoaderThread,
    ) -> None:
        self._rank, self._classes, self._loader, self._report, self._thread = rank, classes, loader, report, thread

    def load(self, message: LoadWorkflow) -> None:
        """Begin to import a workflow's classes. Main thread only, as `drop`."""
        self._thread.put(lambda: self._report(self._answer(message)))

    def drop(self, message: DropWorkflow) -> None:
        """Forget a workflow that no request has any more, with the classes that no other one names."""
        self._thread.put(lambda: self._loader.forget(self._classes.forget(message.name)))

    def _answer(self, message: LoadWorkflow) -> WorkflowLoaded:
        name, classes = message.workflow.name, message.whole_classes
        self._classes.add(name, classes)
        try:
            for each in classes:
                self._loader.add(each)
        except BaseException as error:  # whatever it is, a bad file fails its own request
            self._loader.forget(self._classes.forget(name))
            logger.warning("workflow %s was not taken in use: %s", name, error, extra=of_request(""))
            return WorkflowLoaded(self._rank, message.request_id, _failure(error))
        return WorkflowLoaded(self._rank, message.request_id)


def _failure(error: BaseException) -> Failure:
    if isinstance(error, ConfigError):  # about the file, which the client has sent
        return Failure.of(InvalidRequestError(f"Invalid workflow: {error}.", code="invalid_workflow"))
    return Failure.of(error, traceback.format_exc())
