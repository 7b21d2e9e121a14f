"""Which decoders the GPU's layers take; others are refused by name, before weights are read."""

import pytest
import torch

from legato.core.errors import UnsupportedModelError
from legato.gpu.support import check_supported
from tests.model.random_models import EXPERTS, SPECS

REFUSED = {
    "embeddings for each layer": "has_value_norm is True",
    "values that are keys": "has_value_norm is True",
}
ALL_SPECS = SPECS | EXPERTS


@pytest.mark.parametrize("name", ALL_SPECS)
def test_what_the_kernels_do_not_compute_is_refused(name: str) -> None:
    from legato.gpu.decoder import GpuDecoder

    if name not in REFUSED:
        check_supported(ALL_SPECS[name])
        return
    with pytest.raises(UnsupportedModelError, match=f"CPUs only: {REFUSED[name]}"):
        GpuDecoder(ALL_SPECS[name], dtype=torch.float32, device=torch.device("cpu"))
