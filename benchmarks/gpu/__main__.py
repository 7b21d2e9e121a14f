"""How fast is Legato on this GPU, beside what the GPU can do, and is it right there?

    python -m benchmarks gpu [--out out/gpu] [--model FOLDER] [--part steps] [--again] [--minutes 8]
    python -m benchmarks gpu --part quick      # what is worth most, in three minutes, in OUT/quick
    python -m benchmarks gpu --part peers      # ten minutes; vLLM as `parts/servers.py` says

Runs parts one after the other and prints each as it ends: what the machine can do; decodes, prompts
and both in one step beside the roofline; streams with an ITL promise while long prompts come; the
tests of the kernels, of graphs and of steps in flight on the device; attention beside PyTorch's;
experts, products and sampling alone; a static batch of PyTorch's, and transformers. Weights are
random ones of the shape of Llama 3.1 8B, or of the config.json in `--model`, so that nothing is
downloaded.

Figures are kept, row by row, as JSON: a second call goes on where the first one ended. `page.md`
beside them has all of it, and `out/gpu.tar.gz` has the folder as one file. Exits with status 1
where a part failed, and with 2 without a GPU. A clone needs no installation, only its dependencies.
"""

import argparse
import shlex
import sys
import tarfile
import time
from pathlib import Path

import torch

from benchmarks.gpu.figures import section
from benchmarks.gpu.page import page
from benchmarks.gpu.runner import GROUPS, PARTS, QUICK, measured
from benchmarks.gpu.settings import QUICK_SIZES, Settings, Sizes, shape_folder
from benchmarks.runner.main import main
from benchmarks.runner.run import Run

MINUTES = 8
_GROUP_MINUTES = {QUICK: 3.0, "peers": 10.0}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(out=Path("out/gpu"))
    parser.add_argument("--model", type=Path, help="folder of another shape's config.json")
    parser.add_argument(
        "--part", action="append", choices=[*GROUPS, *PARTS], help="this one, or group, alone"
    )
    parser.add_argument("--again", action="store_true", help="what has been measured, too")
    parser.add_argument("--minutes", type=float, help="that all may take")
    parser.add_argument("--vllm", default="vllm", help="command before `serve`")
    parser.add_argument("--itl-slo-ms", type=float, default=25.0, help="that is promised")


def measure(run: Run) -> int:
    flags = run.flags
    if not torch.cuda.is_available():
        print("benchmarks.gpu measures a GPU, and torch sees none here", file=sys.stderr)
        return 2
    named = flags.part or list(PARTS)
    is_quick = QUICK in named
    settings = Settings(
        model=str(flags.model or shape_folder(flags.out)),
        out=str(flags.out / QUICK if is_quick else flags.out),
        itl_slo_s=flags.itl_slo_ms / 1e3,
        vllm=tuple(shlex.split(flags.vllm)),
        sizes=QUICK_SIZES if is_quick else Sizes(),
    )
    minutes = flags.minutes or max(_GROUP_MINUTES.get(name, MINUTES) for name in named)
    until_s = time.monotonic() + 60 * minutes
    page_path = run.file("page.md")
    found = {}
    parts = list(dict.fromkeys(part for name in named for part in GROUPS.get(name, (name,))))
    for part, figures in measured(settings, parts, again=flags.again, until_s=until_s):
        found[part] = figures
        print(section(figures), end="\n\n", flush=True)
        page_path.write_text(page(settings, found), encoding="utf-8")
        _pack(flags.out)
    run.write(found)
    _pack(flags.out)
    return int(any(figures.failure for figures in found.values()))


def _pack(folder: Path) -> None:
    """Put all of a folder into one file beside it."""
    with tarfile.open(folder.with_name(f"{folder.name}.tar.gz"), "w:gz") as archive:
        archive.add(folder, folder.name)


if __name__ == "__main__":
    main("gpu")
