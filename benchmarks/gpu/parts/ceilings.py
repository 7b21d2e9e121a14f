"""What the machine does at best: everything else is a part of that."""

import platform

import msgspec
import torch

from benchmarks.gpu.clock import median_s
from benchmarks.gpu.figures import Figures, Report, Row
from benchmarks.gpu.settings import Settings
from legato_lab.work import MeasuredRates

_COPY, _PRODUCT = "copy on the device", "matrix product, bfloat16"
_HOT, _WARM_S = ", hot", 2.0
_FEW_ROWS = 32
_TRANSFER_BYTES = 2**20


TITLE = "What the machine can do"


def run(settings: Settings, report: Report) -> None:
    device, sizes = settings.torch_device, settings.sizes
    report.note(_machine(device))
    for name, warm_s in (("", 0.0), (_HOT, _WARM_S)):
        copied = _copy(device, sizes.vector_bytes, warm_s) / 1e12
        report.add(Row(name=_COPY + name, value=copied, unit="TB/s"))
        multiplied = _product(device, sizes.matrix, warm_s) / 1e12
        report.add(Row(name=_PRODUCT + name, value=multiplied, unit="TFLOP/s"))
    report.note("Steps run on a hot chip, so their roofline is made of the hot figures.")
    read = _read_weights(device, sizes.matrix) / 1e12
    report.add(Row(name=f"product of {_FEW_ROWS} rows, weights read", value=read, unit="TB/s"))
    if device.type == "cuda":
        report.add(*_only_on_gpus(device, sizes.matrix))


def known_roofline(settings: Settings) -> MeasuredRates:
    """Of this part's figures, or measured where there are none."""
    file = settings.figures_file("ceilings")
    if file.exists():
        figures = msgspec.json.decode(file.read_bytes(), type=Figures)
        rates = {row.name: 1e12 * row.value for row in figures.rows}
        if _COPY + _HOT in rates and _PRODUCT + _HOT in rates:
            return MeasuredRates(rates[_COPY + _HOT], rates[_PRODUCT + _HOT])
    device, sizes = settings.torch_device, settings.sizes
    return MeasuredRates(
        _copy(device, sizes.vector_bytes, _WARM_S), _product(device, sizes.matrix, _WARM_S)
    )


def _copy(device: torch.device, num_bytes: int, warm_s: float) -> float:
    """Bytes a second, read and written ones."""
    source = torch.randn(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / median_s(lambda: target.copy_(source), device, warm_s=warm_s)


def _product(device: torch.device, size: int, warm_s: float) -> float:
    """Operations a second. Random numbers, since a clock depends on how many bits change."""
    left, right = torch.randn(2, size, size, device=device).bfloat16()
    out = torch.empty_like(left)
    seconds = median_s(lambda: torch.mm(left, right, out=out), device, warm_s=warm_s)
    return 2 * size**3 / seconds


def _read_weights(device: torch.device, size: int) -> float:
    """Bytes a second of weights too large for a cache, times a few rows."""
    weight = torch.randn(4 * size, size, device=device).bfloat16()
    rows = torch.randn(_FEW_ROWS, size, device=device).bfloat16()
    return weight.nbytes / median_s(lambda: rows @ weight.T, device)


def _only_on_gpus(device: torch.device, size: int) -> list[Row]:
    host = torch.empty(_TRANSFER_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)
    up_s = median_s(lambda: there.copy_(host, non_blocking=True), device)
    small = torch.empty(1, device=device)
    launch_s = median_s(lambda: small.add_(1), device, repeats=200)
    rows = [
        Row(name="copy of 1 MiB from pinned memory", value=1e6 * up_s, unit="µs"),
        Row(name="smallest kernel, launched one by one", value=1e6 * launch_s, unit="µs"),
    ]
    if torch.cuda.get_device_capability(device) >= (8, 9):
        rows.append(
            Row(name="matrix product, fp8", value=_fp8(device, size) / 1e12, unit="TFLOP/s")
        )
    return rows


def _fp8(device: torch.device, size: int) -> float:
    left, right = torch.randn(2, size, size, device=device).to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)

    def multiply() -> torch.Tensor:
        return torch._scaled_mm(left, right.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    return 2 * size**3 / median_s(multiply, device)


def _machine(device: torch.device) -> str:
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    if device.type != "cuda":
        return f"{platform.processor() or platform.machine()}, {versions}."
    import triton

    about = torch.cuda.get_device_properties(device)
    return (
        f"{about.name}, {about.total_memory / 2**30:.0f} GiB, {about.multi_processor_count} "
        f"multiprocessors; {versions} (CUDA {torch.version.cuda}, HIP {torch.version.hip}), "
        f"triton {triton.__version__}."
    )
