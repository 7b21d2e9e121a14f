"""Files that pytest-xdist gives to one worker, because they share servers or models."""

from xdist.scheduler import LoadFileScheduling

TOGETHER: dict[str, tuple[str, ...]] = {
    "browser": (
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
        "tests/server/test_drafts.py",
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
        "tests/server/test_many_streams.py",
        "tests/server/test_message_special_tokens.py",
    ),
    "metrics": (
        "tests/server/test_metrics.py",
        "tests/server/test_observability.py",
    ),
    "promises": (
        "tests/server/test_overload.py",
        "tests/server/test_promises.py",
        "tests/server/test_tenant_floods.py",
    ),
    "trusting": (
        "tests/lab/test_clients.py",
        "tests/server/test_lone_surrogates.py",
        "tests/server/test_tool_templates.py",
    ),
}
"""Key a name for the group; value its files; a file is in one group at most."""

_GROUP_OF = {file: name for name, files in TOGETHER.items() for file in files}


class FilesTogether(LoadFileScheduling):
    """Each file, or group of files, is one worker's."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return _GROUP_OF.get(file, file)
