"""Which decoders the GPU's layers take; others are refused by name, before weights are read."""

import pytest
import torch

from legato.core.errors import UnsupportedModelError
from legato.gpu.support import check_supported
from tests.model.random_models import EXPERTS, SPECS, decoder_spec

ALL_SPECS = SPECS | EXPERTS


@pytest.mark.parametrize("name", ALL_SPECS)
def test_what_the_kernels_compute(name: str) -> None:
    check_supported(ALL_SPECS[name])


def test_what_the_kernels_do_not_compute_is_refused() -> None:
    from legato.gpu.decoder import GpuDecoder

    spec = decoder_spec(activation="xielu")
    with pytest.raises(UnsupportedModelError, match="CPUs only: activation is 'xielu'"):
        GpuDecoder(spec, dtype=torch.float32, device=torch.device("cpu"))
