"""Files that pytest-xdist gives to one worker, because they share servers or models."""

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

TOGETHER: dict[str, tuple[str, ...]] = {
    "browser": (
        "tests/browser/test_chat.py",
        "tests/browser/test_dashboard.py",
        "tests/browser/test_fleet.py",
        "tests/browser/test_origins.py",
        "tests/browser/test_reference.py",
    ),
    "default model": (
        "tests/exactness/test_formats.py",
        "tests/exactness/test_smollm2.py",
    ),
    "drafting and lab": (
        "tests/api/test_drafts.py",
        "tests/lab/test_cli.py",
        "tests/lab/test_load.py",
        "tests/lab/test_probe.py",
        "tests/lab/test_vocabulary.py",
    ),
    "families": (
        "tests/families/test_exactness.py",
        "tests/families/test_logits.py",
        "tests/families/test_native.py",
    ),
    "fuzz": (
        "tests/fuzz/test_answers.py",
        "tests/fuzz/test_clients.py",
        "tests/fuzz/test_large.py",
        "tests/fuzz/test_openapi.py",
        "tests/fuzz/test_settings.py",
        "tests/fuzz/test_watch.py",
    ),
    "guarded": (
        "tests/api/test_many_streams.py",
        "tests/api/test_message_special_tokens.py",
    ),
    "metrics": (
        "tests/api/test_metrics.py",
        "tests/api/test_observability.py",
    ),
    "promises": (
        "tests/api/test_overload.py",
        "tests/api/test_promises.py",
        "tests/api/test_tenant_floods.py",
    ),
    "trusting": (
        "tests/lab/test_clients.py",
        "tests/api/test_lone_surrogates.py",
        "tests/api/test_tool_templates.py",
    ),
}
"""Key a name for the group; value its files; a file is in one group at most."""

_GROUP_OF = {file: name for name, files in TOGETHER.items() for file in files}


class FilesTogether(LoadFileScheduling):
    """Each file, or group of files, is one worker's.

    Once a worker has died, pytest-xdist's own scheduler (3.8) runs the test it died in again, and
    waits without end for workers it gave a file that is done: they have nothing to report.
    """

    def remove_node(self, node: WorkerController) -> str | None:
        """Give the tests of a worker that has ended to others; return the test it died in."""
        files = self.assigned_work.pop(node)
        left = [(tests, test) for tests in files.values() for test in tests if not tests[test]]
        if not left:
            return None
        tests, died_in = left[0]
        tests[died_in] = True
        self.workqueue |= files
        for other in self.assigned_work:
            self._reschedule(other)
        return died_in

    def _reschedule(self, node: WorkerController) -> None:
        """Give a worker files until it has tests to begin with: one holds its last test back."""
        while self.workqueue and not node.shutting_down:
            if self._pending_of(self.assigned_work[node]) > 2:
                return
            self._assign_work_unit(node)
        super()._reschedule(node)

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return _GROUP_OF.get(file, file)
