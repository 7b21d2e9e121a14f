"""Nothing that comes from outside, over a socket or in a checkpoint, is run or unpickled."""

import ast
from pathlib import Path

import pytest

from tests import house

FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
# `torch.load` unpickles; `multiprocessing` pickles what it sends.
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "torch.save", "yaml.load", "np.load"}


@pytest.mark.parametrize("path", house.sources(), ids=lambda path: path.name)
def test_no_pickle_and_no_eval(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & FORBIDDEN_MODULES
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in FORBIDDEN_MODULES
        elif isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in FORBIDDEN_CALLS
        elif isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            assert ast.unparse(node.value) == "False"
